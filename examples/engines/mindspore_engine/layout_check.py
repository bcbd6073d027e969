"""What the MindSpore engine can train. Imports no MindSpore: the controller imports this module."""

from collections.abc import Mapping
from typing import Any

from trainer.config import TrainerConfig
from trainer.engines.decoder_config import parse_decoder_config
from trainer.engines.model_check import ModelLimits


def check_layout(config: TrainerConfig, hf_config: Mapping[str, Any]) -> ModelLimits:
    """The engine's `LayoutCheck`."""
    if config.num_ranks != 1:
        raise ValueError(
            f"the layout has {config.num_ranks} ranks; the MindSpore engine shards nothing and has one. "
            "The engine 'torchtitan' has several"
        )
    for name, accepted in (
        ("compute_dtype", "float32"),
        ("compile", False),
        ("head_dtype", None),
        ("float8", "none"),
        ("activation_checkpointing", "none"),
        ("lora", None),
    ):
        if getattr(config, name) != accepted:
            raise ValueError(
                f"TrainerConfig.{name} is {getattr(config, name)!r}; with the MindSpore engine it must be "
                f"{accepted!r}. The engine 'torchtitan' has it"
            )
    decoder = parse_decoder_config(hf_config)
    if decoder.moe is not None:
        raise ValueError(
            f"config.json: the model has {decoder.moe.num_experts} experts in a layer; the MindSpore engine trains "
            "dense models. The engine 'torchtitan' trains mixtures of experts"
        )
    return ModelLimits(vocab_size=decoder.vocab_size, max_seq_len=decoder.max_seq_len)
