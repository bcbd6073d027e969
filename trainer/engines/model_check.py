"""Whether an engine can train a model in a layout, from the configuration and what the host has.

No engine is imported, so the controller can refuse a mistake before any process starts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.types import Head
from trainer.config import TrainerConfig
from trainer.engines.hardware_check import check_hardware
from trainer.engines.hf_config import check_head, check_supported, read_config_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What a batch may hold."""

    vocab_size: int
    max_seq_len: int


def check_model(config: TrainerConfig) -> ModelLimits:
    """Raises ValueError for a model that the engine cannot train, or not in this layout."""
    raw = read_config_json(config.model)
    check_head(raw, config.head)
    if config.engine == "torchtitan":
        hf_config = check_supported(raw)
        hf_config.check_layout(
            config.tensor_parallel, config.expert_parallel, sequence_parallel=config.sequence_parallel
        )
        hf_config.check_stages(config.pipeline_parallel, config.num_stages, config.head)
        check_hardware(config, has_experts=hf_config.moe is not None)
        return ModelLimits(vocab_size=hf_config.vocab_size, max_seq_len=hf_config.max_seq_len)
    _check_transformers_layout(config)
    if not isinstance(raw.get("vocab_size"), int):
        raise ValueError(f"{config.model / 'config.json'} lacks 'vocab_size'")
    # Without a limit of its own a model takes what fits into memory.
    longest = raw.get("max_position_embeddings") or raw.get("n_positions") or 1 << 20
    return ModelLimits(vocab_size=raw["vocab_size"], max_seq_len=longest)


def describe_model(path: Path, head: Head) -> Mapping[str, Any]:
    """What a checkpoint says of its model, the same for every engine. Weights fit where it is equal."""
    raw = read_config_json(path)
    try:
        return {**asdict(check_supported(raw)), "head": head}
    except ValueError:
        # Of an architecture that only transformers knows, its own words, as far as they concern the weights.
        ignored = ("_", "transformers_version", "torch_dtype", "dtype", "use_cache")
        return {**{key: value for key, value in raw.items() if not key.startswith(ignored)}, "head": head}


def _check_transformers_layout(config: TrainerConfig) -> None:
    for name, neutral in (("compile", False), ("float8", "none")):
        if getattr(config, name) != neutral:
            raise ValueError(
                f"TrainerConfig.{name} is {getattr(config, name)!r}; engine {config.engine!r} leaves models as they "
                f"are, so it must be {neutral!r}. The engine 'torchtitan' has it"
            )
    if config.num_ranks != config.num_data_parallel_ranks:
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r}, which only shards data; data_parallel_replicate x "
            f"data_parallel_shard is {config.num_data_parallel_ranks} of {config.num_ranks} ranks. "
            "The engine 'torchtitan' has the other parallelisms"
        )
    if config.expert_parallel > 1:
        raise ValueError(
            f"TrainerConfig.expert_parallel is {config.expert_parallel}; engine {config.engine!r} only shards data, "
            "so it must be 1. The engine 'torchtitan' has the other parallelisms"
        )
    if config.activation_checkpointing == "selective":
        raise ValueError(
            f"TrainerConfig.activation_checkpointing is 'selective'; engine {config.engine!r} has 'none' and 'full'"
        )
