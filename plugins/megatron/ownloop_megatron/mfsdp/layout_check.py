"""Which models, layouts and options the megatron_fsdp engine can train. Does not import Megatron-FSDP."""

from collections.abc import Mapping

import torch

from ownloop_megatron.flat_check import check_layout as check_flat_layout
from rl.checks import did_you_mean
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits

_SWITCHES = (
    *("overlap_grad_reduce", "overlap_param_gather", "disable_bucketing", "nccl_ub", "fsdp_double_buffer"),
    *("fsdp_db_use_persist_buf_on_alloc_fail", "disable_symmetric_registration", "enable_fine_grained_param_gather"),
    *("report_nan_in_param_grad", "maxpool_double_buffer"),
)
_FIXED = (
    *("module", "device_mesh", "dp_shard_dim", "dp_outer_dim", "tp_dim", "hybrid_fsdp_group", "expt_device_mesh"),
    *("hybrid_fsdp_expt_group", "fsdp_group_ag", "expt_fsdp_group_ag", "outer_dp_sharding_strategy", "device"),
    *("init_model_with_meta_device", "mixed_precision_policy", "sync_model_each_microbatch", "fsdp_unit_modules"),
    *("preproc_state_dict_for_dcp_ckpt", "average_in_collective", "calculate_per_token_loss"),
    *("keep_fp8_transpose_cache", "use_decoupled_grad", "cuda_graph_mode"),
)
_ZERO_3 = ("optim_grads_params", 3)


def check_layout(config: TrainerConfig, hf_config: Mapping[str, object]) -> ModelLimits:
    """The engine's `LayoutCheck`."""
    limits = check_flat_layout(config, hf_config)
    for name, value in config.engine_args.items():
        _check_option(name, value)
    if config.data_parallel_replicate > 1:
        raise ValueError(
            f"TrainerConfig.data_parallel_replicate is {config.data_parallel_replicate}; engine {config.engine!r} "
            "shards over all ranks, so it must be 1. The engine 'fsdp2' has replicas"
        )
    if not torch.cuda.is_available():
        raise ValueError(
            f"TrainerConfig.engine is {config.engine!r}, which needs CUDA, and this host has no GPU; here the engine "
            "'fsdp2' trains the same models, sharded in the same way"
        )
    return limits


def _check_option(name: str, value: object) -> None:
    where = f"TrainerConfig.engine_args[{name!r}]"
    if name in _FIXED:
        raise ValueError(f"{where} follows from the layout or the engine and cannot be chosen")
    if name == "zero_dp_strategy":
        if value not in _ZERO_3:
            raise ValueError(
                f"{where} is {value!r}; engine 'megatron_fsdp' has 'optim_grads_params' (ZeRO-3), with which alone its "
                "gradients are exact"
            )
    elif name not in _SWITCHES:
        known = [*_SWITCHES, "zero_dp_strategy"]
        raise ValueError(f"{where}: Megatron-FSDP's fully_shard has no such option{did_you_mean(name, known)}")
    elif not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r}; it must be True or False")
