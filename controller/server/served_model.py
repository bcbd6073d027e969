"""A base model that the server trains adapters of and samples from."""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from controller.server.snapshots import Snapshots
from controller.server.throughput import Throughput
from generator.openai_calls import OpenAICall, OpenAIReply
from rl.lora import LoRAConfig
from rl.protocols import Generator, Trainer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeTraining:
    """A full fine-tuning that has begun."""

    trainer: Trainer
    served: "ServedModel"
    """What its sampling clients sample from."""
    end: Callable[[], Awaitable[None]]
    """Ends its processes. May be called again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """The frozen base with its generator. All adapters share both."""

    names: tuple[str, ...]
    """By which clients may ask for it. The first one is what the server calls it."""
    tokenizer: str
    """What clients load its tokenizer from: a directory or a name on the Hugging Face Hub."""
    adapter: Callable[[str, LoRAConfig], Awaitable[Trainer]]
    """Makes an adapter under a name."""
    generator: Generator
    max_rank: int
    """The highest rank of an adapter that the generator can serve."""
    max_context: int
    """Tokens of a prompt and its completion together."""
    vocab_size: int
    """Token ids are smaller."""
    snapshots: Snapshots
    """The versions that the generator keeps."""
    openai: Callable[[OpenAICall], Awaitable[OpenAIReply]] | None = None
    """Answers requests in OpenAI's form; None if the generator cannot."""
    whole: Callable[[], Awaitable[WholeTraining]] | None = None
    """Begins a full fine-tuning; None if the server was started without room for one."""
    throughput: Throughput = field(default_factory=Throughput)

    @property
    def name_for_clients(self) -> str:
        """The model's name in answers from which clients load a tokenizer: where the tokenizer is, not an alias.

        The SDK takes a name with two slashes for a variant of a model, and leaves out the variant. A directory with two
        slashes gets a third one at its end.
        """
        is_taken_apart = Path(self.tokenizer).is_absolute() and self.tokenizer.count("/") == 2
        return f"{self.tokenizer}/" if is_taken_apart else self.tokenizer


class ServedModels:
    """The models of a server."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        """At least one. Raises ValueError if two have a name in common."""
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in self._models:
            for name in model.names:
                if name in self._by_name:
                    raise ValueError(f"two models are served as {name!r}; every name must mean one model")
                self._by_name[name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all models."""
        return tuple(self._by_name)

    def find(self, name: str) -> ServedModel:
        """The model of this name. Raises ValueError, naming those that there are, for any other."""
        if Path(name).is_absolute():
            name = str(Path(name))  # without a slash at its end
        if name not in self._by_name:
            raise ValueError(f"base_model is {name!r}; this server serves {', '.join(self.names)}")
        return self._by_name[name]
