"""Whether an engine can train a model in a layout, judged by the configuration and this host's hardware.

No engine is imported, so the controller can refuse a mistake before any process starts.
"""

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from rl.system.decoders import CLASSIFIER_SUFFIX
from rl.system.hf_config import (
    experts_of,
    find_family,
    is_tied,
    parse_decoder_config,
    read_config,
    read_config_file,
    understanding,
)
from rl.system.model_files import check_head
from rl.system.plugins import how_to_install, owner_of
from rl.types import Head
from trainer.config import TrainerConfig
from trainer.engine_table import all_engines, find_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a batch may hold."""

    vocab_size: int
    max_seq_len: int
    experts: tuple[int, int, int] | None = None
    """Layers, experts of a token, and experts to choose from; None for a dense model."""
    reads_images: bool = False


class LayoutCheck(Protocol):
    """What each engine brings to be checked with."""

    def __call__(self, config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
        """Raises ValueError if the engine cannot train the model, or cannot train it in this layout or on this host.

        `hf_config` holds the contents of the model's `config.json`.
        """
        ...


def check_model(config: TrainerConfig) -> ModelLimits:
    """Raises ValueError if the engine cannot train the model, or cannot train it in this layout or on this host."""
    with understanding(config.model):
        return _checked(config, read_config(config.model))


def _checked(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    _check_head(hf_config, config.head)
    if config.lora is not None:
        _check_lora(config)
    entry = find_engine(config.engine)
    check: LayoutCheck = resolve_name(entry.layout_check)
    if config.engine_args and not entry.takes_args:
        takers = ", ".join(repr(name) for name, each in all_engines().items() if each.takes_args)
        raise ValueError(
            f"TrainerConfig.engine_args is {dict(config.engine_args)}; engine {config.engine!r} takes none. The "
            f"engines that do are {takers}"
        )
    limits = check(config, hf_config)
    if (family := find_family(hf_config)) is not None and family.check:
        resolve_name(family.check)(config, hf_config)
    if config.train_vision and not limits.reads_images:
        raise ValueError("TrainerConfig.train_vision is True; that needs a model that reads images")
    if config.head == "lm":
        check_head(config.model, tied=is_tied(hf_config))
    if entry.requires and importlib.util.find_spec(entry.requires) is None:
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r}, which needs {entry.requires!r}, which is not installed: "
            f"{how_to_install(owner_of('engines', config.engine))}"
        )
    return replace(limits, experts=experts_of(hf_config))


def describe_model(path: Path, head: Head) -> Mapping[str, object]:
    """Returns what a checkpoint records about its model. It is the same for every engine.

    Weights of one model fit another if the descriptions are equal.
    """
    hf_config = read_config(path)
    with contextlib.suppress(ValueError):  # torchtitan does not build it, so it has no shape
        decoder = parse_decoder_config(hf_config)
        if decoder.identifies:
            return {**asdict(decoder), "head": head}
    # Keep every key of its config.json that concerns the weights.
    ignored = ("_", "transformers_version", "torch_dtype", "dtype", "use_cache")
    stated = read_config_file(path)
    return {**{key: value for key, value in stated.items() if not key.startswith(ignored)}, "head": head}


def _check_lora(config: TrainerConfig) -> None:
    """Raises ValueError for options that go with training the whole model only, and for adapters of nothing."""
    if config.lora is not None and not config.lora.module_names and not config.train_vision:
        raise ValueError(
            "LoRAConfig: train_attn, train_mlp and train_unembed are all False; at least one must be True, or "
            "TrainerConfig.train_vision"
        )
    for name, accepted in (("head", "lm"), ("compile", False), ("float8", "none")):
        if getattr(config, name) != accepted:
            raise ValueError(
                f"TrainerConfig.{name} is {getattr(config, name)!r} and lora is given; with adapters it must be "
                f"{accepted!r}, or lora None, which trains the whole model"
            )
    if not find_engine(config.engine).trains_adapters:
        accepted = ", ".join(repr(name) for name, entry in all_engines().items() if entry.trains_adapters)
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r} and lora is given; "
            f"the engines that train adapters are {accepted}"
        )


def _check_head(hf_config: Mapping[str, Any], head: Head) -> None:
    architectures: list[str] = hf_config.get("architectures") or []
    if head == "lm" and any(name.endswith(CLASSIFIER_SUFFIX) for name in architectures):
        raise ValueError(
            f"config.json: architectures is {architectures}, a model without a language model's output projection; it "
            "needs TrainerConfig.head 'value', not 'lm'"
        )
