"""From a model directory and a layout to a loaded and parallelized torchtitan model, in the order torchtitan needs."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from trainer.config import TrainerConfig
from trainer.engines.hf_config import HFModelConfig
from trainer.engines.ranks import DTYPES
from trainer.engines.titan.attention import choose_inner_attention
from trainer.engines.titan.models import build_spec, load_weights, share_rope_cache


def build_model(config: TrainerConfig, hf_config: HFModelConfig, device: torch.device) -> Decoder:
    """The model with its float32 weights loaded, sharded as the layout says."""
    spec = build_spec(hf_config, choose_inner_attention(device, DTYPES[config.compute_dtype]))
    if config.num_ranks > 1:
        model = _build_parallel(config, spec)
    else:
        with torch.device("meta"):
            model = spec.model.build()
        if (checkpointing := _activation_checkpointing(config)) is not None:
            checkpointing.build().apply(model)
    assert isinstance(model, Decoder)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
        load_weights(model, config.model)
    share_rope_cache(model)
    return model


@dataclass
class _RuntimeConfig:
    """The part of torchtitan's trainer configuration that a model reads."""

    parallelism: ParallelismConfig


def _build_parallel(config: TrainerConfig, spec: ModelSpec) -> torch.nn.Module:
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=config.data_parallel_replicate,
        data_parallel_shard_degree=config.data_parallel_shard,
        tensor_parallel_degree=config.tensor_parallel,
        # torch 2.13 lacks what torchtitan's default backend needs with more than one rank.
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    spec.model.update_from_config(config=_RuntimeConfig(parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=config.compute_dtype),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=_activation_checkpointing(config),
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are plain sums; gloo has no reduction that also scales.
            module.set_force_sum_reduction_for_comms(True)
    return model


def _activation_checkpointing(config: TrainerConfig) -> ActivationCheckpointing.Config | None:
    if config.activation_checkpointing == "none":
        return None
    return FullAC.Config() if config.activation_checkpointing == "full" else SelectiveAC.Config()
