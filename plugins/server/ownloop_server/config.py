"""What `ownloop serve` serves and where, and the options of each model. Imports no package of the server's."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from generator.config import GeneratorConfig
from generator.openai_calls import OpenAICall
from rl.configuration import AnyPath, Positive, Several, configuration
from trainer.config import TrainerConfig


@configuration
class Limits:
    """What a server accepts, for each user."""

    body_mb: PositiveInt = 64
    """The largest request, in MiB."""
    batch_datums: PositiveInt = 16384
    """Most datums of one `forward_backward` request. The SDK sends a larger batch as several requests."""
    batch_tokens: PositiveInt = 2**22
    """Most tokens of one `forward_backward` request."""
    requests_per_s: Positive = 2000.0
    """Requests per second; the requests of two seconds may come at once."""
    image_folder: AnyPath | None = None
    """Files below this folder may be named by an asset pointer to an image. Without it, a pointer is a data URL."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ValueError(f"image_folder is {self.image_folder}; it must be a folder that exists")

    @property
    def body_bytes(self) -> int:
        """The largest request, in bytes."""
        return self.body_mb * 2**20


@configuration
class ServeConfig:
    """A server of models whose adapters clients train and sample from."""

    model: Several[str] = ()
    """A base model: a directory, a name of `ownloop model`, or ORG/NAME on the Hugging Face Hub. May be given several
    times; each has a trainer and a generator of its own."""
    names: Several[str] = ()
    """Further names by which clients may ask for the model, for scripts that name another one. With several models:
    NAME=MODEL."""
    host: str = "127.0.0.1"
    """The address to listen at. At an address that other hosts reach, every client needs a key of `ownloop key`."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    """The port to listen at; 0 takes any free one."""
    folder: AnyPath = Path("gateway")
    """Where checkpoints, the database and logs are kept."""
    tls_certificate: AnyPath | None = None
    """A file with the certificate, and its chain, to serve https with."""
    tls_key: AnyPath | None = None
    """The file of the certificate's private key."""
    limits: Limits = field(default_factory=Limits)
    """What requests may ask for."""
    tool_parser: Several[str] = ()
    """For OpenAI's endpoints: vLLM's parser that finds tool calls in a completion, such as hermes. With several models,
    MODEL=PARSER chooses it for one of them."""
    reasoning_parser: Several[str] = ()
    """For OpenAI's endpoints: vLLM's parser that separates reasoning and answer, such as qwen3. With several models,
    MODEL=PARSER chooses it for one of them."""
    max_rank: PositiveInt = 32
    """The highest rank of an adapter. All adapters cost the generator as much memory as one of this rank."""
    full: NonNegativeInt = 0
    """Clients that may train all weights (`rank=0`) at the same time. Each starts a trainer and a generator of its own,
    which need as much memory again."""
    max_snapshots: PositiveInt = 24
    """Versions of adapters that the generator keeps for sampling clients."""
    max_restarts: NonNegativeInt = 3
    """Most times within `restart_window_minutes` that a trainer which dies is started again."""
    restart_window_minutes: Positive = 60.0
    """The time in which `max_restarts` are counted."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer; its `model` and `lora` are set by the server."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    """The generator; its `model` and `lora` are set by the server."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if not is_address(self.host):
            raise ValueError(
                f"ServeConfig.host is {self.host!r}; it must be an address of this host, such as 127.0.0.1, or 0.0.0.0 "
                "for all of them"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("certificate", "key") if self.tls_key is None else ("key", "certificate")
            raise ValueError(f"ServeConfig.tls_{given} is given and tls_{missing} is not; https needs both")
        transport = self.generator.weight_transport
        # the weight store knows versions by number, and several models would share them
        if self.full > 1 and transport not in ("auto", "shared_memory"):
            raise ValueError(
                f"ServeConfig.full is {self.full} and generator.weight_transport is {transport!r}; "
                "several models that are trained as a whole push through shared_memory"
            )
        if self.trainer.lora is not None or self.generator.lora is not None:
            raise ValueError("ServeConfig: trainer.lora and generator.lora are set by the server; use max_rank")
        for role, placement in (("trainer", self.trainer.placement), ("generator", self.generator.placement)):
            if placement != "split":
                raise ValueError(
                    f"ServeConfig.{role}.placement is {placement!r}; it must be 'split': it serves both sides at once"
                )


def is_address(host: str) -> bool:
    """Whether a server can listen at it."""
    try:
        return host == "localhost" or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_this_host(host: str) -> bool:
    """Whether a name or an address always means the host itself."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """One model."""

    directory: Path
    names: tuple[str, ...]
    """By which clients may ask for it. The first one is what the server calls it."""
    tool_parser: str = ""
    """The name of vLLM's parser of tool calls; empty for none."""
    reasoning_parser: str = ""
    """The name of vLLM's parser of reasoning; empty for none."""

    def parse(self, call: OpenAICall) -> OpenAICall:
        """The same request, with this model's parsers."""
        return replace(call, tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)


def model_options(config: ServeConfig, models: Mapping[str, Path]) -> list[ModelOptions]:
    """The options of each model. `models` are the directories by the names after `--model`.

    Raises ValueError for a name or a parser that could be any model's, or is of none.
    """
    names = {model: [model, str(directory)] for model, directory in models.items()}
    for further in config.names:
        alias, _, model = further.partition("=")
        model = model or (config.model[0] if len(config.model) == 1 else "")
        if model not in names:
            raise ValueError(
                f"ServeConfig.names has {further!r}; with several models it must be NAME=MODEL, where MODEL is one of "
                f"{', '.join(models)}"
            )
        names[model].append(alias)
    tools = _parsers("tool_parser", config.tool_parser, models)
    reasoning = _parsers("reasoning_parser", config.reasoning_parser, models)
    return [
        ModelOptions(
            directory=directory,
            names=tuple(dict.fromkeys(names[model])),  # a name may be given twice; the order stays
            tool_parser=tools[model],
            reasoning_parser=reasoning[model],
        )
        for model, directory in models.items()
    ]


def _parsers(field: str, given: Sequence[str], models: Mapping[str, Path]) -> dict[str, str]:
    """The parser of each model: a name alone is for all models, MODEL=PARSER for one of them."""
    found = dict.fromkeys(models, "")
    for entry in sorted(given, key=lambda entry: "=" in entry):  # what is said of one model counts more
        model, _, parser = entry.rpartition("=")
        if model and model not in models:
            raise ValueError(
                f"ServeConfig.{field} has {entry!r}; it must be PARSER, or MODEL=PARSER, where MODEL is one of "
                f"{', '.join(models)}"
            )
        found.update(dict.fromkeys([model] if model else models, parser))
    return found
