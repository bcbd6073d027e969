"""Which models and layouts the transformers engines, `fsdp2` and `fsdp1`, can train."""

from collections.abc import Mapping
from typing import Any

from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits


def check_layout(config: TrainerConfig, hf_config: Mapping[str, Any]) -> ModelLimits:
    """The `LayoutCheck` of both engines. Whether transformers can build the model is found out by building it."""
    _check_options(config)
    _check_parallelism(config)
    _check_experts(config, hf_config)
    if not isinstance(hf_config.get("vocab_size"), int):
        raise ValueError(f"{config.model / 'config.json'} lacks 'vocab_size'")
    # A model that states no limit takes sequences as long as fit into memory.
    longest = hf_config.get("max_position_embeddings") or hf_config.get("n_positions") or 1 << 20
    return ModelLimits(vocab_size=hf_config["vocab_size"], max_seq_len=longest)


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


def _check_experts(config: TrainerConfig, hf_config: Mapping[str, Any]) -> None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = next((name for name in names if (hf_config.get(name) or 0) > 1), None)
    if found is not None:
        # transformers stacks the weights of experts, so their parameters are not those of the checkpoint.
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r} and config.json has {found} {hf_config[found]}; this engine "
            "does not train mixtures of experts. The engine 'torchtitan' trains Qwen3-MoE"
        )


def _check_parallelism(config: TrainerConfig) -> None:
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
