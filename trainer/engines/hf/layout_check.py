"""Which models and layouts an engine over models of transformers can train."""

import warnings
from collections.abc import Mapping
from typing import Any

from rl.system.decoders import backbone
from rl.system.hf_config import (
    VisionParts,
    agreed_settings,
    find_family,
    longest_context,
    proven_architectures,
    vision_of,
)
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits


def check_layout(config: TrainerConfig, hf_config: Mapping[str, Any]) -> ModelLimits:
    """The `LayoutCheck` of `fsdp2`, and part of others'."""
    _check_options(config)
    vision = vision_of(hf_config)
    _check_parallelism(config, vision)
    if not isinstance(hf_config.get("vocab_size"), int):
        raise ValueError(f"{config.model / 'config.json'} lacks 'vocab_size'")
    backbones = {backbone(name) for name in hf_config.get("architectures") or ()}
    if (family := find_family(hf_config)) is not None and config.engine not in family.engines:
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r} and the model is a {family.architectures[0]}, which "
            f"{' and '.join(map(repr, family.engines))} can train"
        )
    stated = {**hf_config, **(hf_config.get("rope_parameters") or {})}
    for key, agreed in agreed_settings(hf_config).items():
        if stated.get(key) not in (None, agreed):
            raise ValueError(f"config.json: {key} is {stated[key]!r}; vLLM and transformers agree only on {agreed!r}")
    if not backbones & set(proven_architectures()):
        _check_unproven(config, sorted(backbones))
    longest, reads_images = longest_context(hf_config), vision is not None
    return ModelLimits(vocab_size=hf_config["vocab_size"], max_seq_len=longest, reads_images=reads_images)


def _check_unproven(config: TrainerConfig, architectures: list[str]) -> None:
    """Builds the model, without its weights. Raises ValueError if a weight has no match by name; else warns."""
    # Imports transformers, which takes seconds, so models of proven architectures do without.
    from trainer.engines.hf.transformers_policy import check_weight_names

    check_weight_names(config.model, config.head)
    warnings.warn(
        f"no test covers {', '.join(architectures) or 'a model without architectures'} with trainer and generator; "
        "watch the metric logprob_mismatch_mean of the first steps. Proven are " + ", ".join(proven_architectures()),
        stacklevel=2,
    )


def _check_options(config: TrainerConfig) -> None:
    for name, neutral in (("compile", False), ("float8", "none")):
        if getattr(config, name) != neutral:
            raise ValueError(
                f"TrainerConfig.{name} is {getattr(config, name)!r}; engine {config.engine!r} leaves models as they "
                f"are, so it must be {neutral!r}. The engine 'torchtitan' has it"
            )
    if config.activation_checkpointing == "selective":
        raise ValueError(
            f"TrainerConfig.activation_checkpointing is 'selective'; engine {config.engine!r} has 'none' and 'full'"
        )


def _check_parallelism(config: TrainerConfig, vision: VisionParts | None) -> None:
    splits = vision is not None and bool(vision.split) and config.engine == "fsdp2"
    others = "no engine divides models that read images so" if vision else "'torchtitan' has the other parallelisms"
    for name in ("pipeline_parallel", "context_parallel", "tensor_parallel", "expert_parallel"):
        if (size := getattr(config, name)) > 1 and not (splits and name == "tensor_parallel"):
            raise ValueError(
                f"TrainerConfig.{name} is {size}; engine {config.engine!r} only shards data, so it must be 1; {others}"
            )
