"""From a model directory and a layout to a loaded and parallelized torchtitan model, in the order torchtitan needs."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec

from trainer.config import TrainerConfig
from trainer.engines.hf_config import HFModelConfig
from trainer.engines.ranks import DTYPES
from trainer.engines.titan.attention import choose_inner_attention
from trainer.engines.titan.models import build_spec, load_weights, share_rope_cache


def build_model(
    config: TrainerConfig, hf_config: HFModelConfig, device: torch.device
) -> tuple[Decoder, DeviceMesh | None]:
    """The model with its float32 weights loaded, sharded as the layout says, and the mesh of its context parallelism.

    The mesh, of this rank's context-parallel group, is None where there is no such parallelism.
    """
    attention = choose_inner_attention(
        device, DTYPES[config.compute_dtype], context_parallel=config.context_parallel > 1
    )
    spec = build_spec(hf_config, config.head, attention)
    context_mesh: DeviceMesh | None = None
    if config.num_ranks > 1:
        dims = _parallel_dims(config)
        context_mesh = dims.get_optional_mesh("cp")
        model = _build_parallel(config, spec, dims)
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
    return model, context_mesh


@dataclass
class _RuntimeConfig:
    """The part of torchtitan's trainer configuration that a model reads."""

    parallelism: ParallelismConfig


def _parallelism(config: TrainerConfig) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_replicate_degree=config.data_parallel_replicate,
        data_parallel_shard_degree=config.data_parallel_shard,
        tensor_parallel_degree=config.tensor_parallel,
        context_parallel_degree=config.context_parallel,
        expert_parallel_degree=config.expert_parallel,
        # torch 2.13 lacks what torchtitan's default backend needs with more than one rank.
        spmd_backend="partial_dtensor",
    )


def _parallel_dims(config: TrainerConfig) -> ParallelDims:
    parallelism = _parallelism(config)
    set_spmd_backend(parallelism.spmd_backend)  # modules look it up while they run
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    return dims


def _build_parallel(config: TrainerConfig, spec: ModelSpec, dims: ParallelDims) -> torch.nn.Module:
    parallelism = _parallelism(config)
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
