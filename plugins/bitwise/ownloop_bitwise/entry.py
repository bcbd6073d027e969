"""The row of the engine `bitwise`, and which configurations it trains. Imports neither torch nor torchtitan."""

from collections.abc import Mapping

from ownloop_bitwise.shape import as_llama, check_host, refused_on_gpus, shape_of
from rl.system.hardware import sees_gpu
from trainer.config import TrainerConfig
from trainer.engine_table import EngineEntry
from trainer.engines.model_check import ModelLimits
from trainer.engines.titan import layout_check

_ONE_VALUE: Mapping[str, tuple[object, str]] = {
    "tensor_parallel": (1, "ranks would add parts of a product; use data_parallel_shard"),
    "context_parallel": (1, "ranks would add parts of attention's sums; use data_parallel_shard"),
    "pipeline_parallel": (1, "it was not tried; use data_parallel_shard"),
    "expert_parallel": (1, "there are no kernels for experts"),
    "head_dtype": (None, "logits are computed in compute_dtype"),
    "compile": (False, "compiled layers compute in another order"),
    "float8": ("none", "there are no kernels for float8"),
}


def check_layout(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    """The engine's `LayoutCheck`."""
    for name, (accepted, reason) in _ONE_VALUE.items():
        if (found := getattr(config, name)) != accepted:
            raise ValueError(
                f"TrainerConfig.{name} is {found!r}; with numerics 'bitwise' it must be {accepted!r}: {reason}"
            )
    shape_of(hf_config)
    check_host(has_gpu := sees_gpu())
    if has_gpu and config.lora is not None:
        raise refused_on_gpus("TrainerConfig.lora", config.lora, "train all weights")
    return layout_check.check_layout(config, as_llama(hf_config))


ENTRY = EngineEntry(
    engine="ownloop_bitwise.engine:BitwiseEngine",
    layout_check="ownloop_bitwise.entry:check_layout",
    trains_adapters=True,
    takes_muon=True,
    numerics="bitwise",
)
