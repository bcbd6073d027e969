"""Which models the engines can train that shard stretches of flattened parameters. Imports neither of them."""

from collections.abc import Mapping

from rl.system.hf_config import num_experts
from trainer.config import TrainerConfig
from trainer.engines.hf.layout_check import check_layout as check_transformers_layout
from trainer.engines.model_check import ModelLimits


def check_layout(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    """The `LayoutCheck` of `fsdp1`."""
    if count := num_experts(hf_config):
        # transformers stacks the weights of experts, and a rank's part of a flattened stack is no view of an expert.
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r} and the model's layers have {count} experts; this engine does "
            "not train mixtures of experts. The engines 'fsdp2' and 'torchtitan' do"
        )
    return check_transformers_layout(config, hf_config)
