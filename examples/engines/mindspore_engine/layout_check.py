"""What the MindSpore engine can train. Imports no MindSpore: the controller imports this module."""

from collections.abc import Mapping
from typing import Any

from rl.system.hf_config import parse_decoder_config
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits

_FAMILIES = ("llama", "qwen2", "qwen3")


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
    if decoder.family not in _FAMILIES:
        raise ValueError(
            f"config.json: architectures is {hf_config.get('architectures')}; the MindSpore engine trains the families "
            f"{', '.join(_FAMILIES)}. The engine 'torchtitan' trains this one"
        )
    return ModelLimits(vocab_size=decoder.vocab_size, max_seq_len=decoder.max_seq_len)
