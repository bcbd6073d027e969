"""From a model directory and a layout to a loaded and parallelized torchtitan model, in the order torchtitan needs."""

import os
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
from trainer.engines.titan.attention import choose_inner_attention
from trainer.engines.titan.models import build_spec, hf_parameters, load_hf_weights, share_rope_cache

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device() -> torch.device:
    """This rank's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def init_process_group(config: TrainerConfig, device: torch.device) -> None:
    """Joins this rank to its peers. Raises ValueError when the world is not of the size that the layout asks for."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.num_ranks:
        raise ValueError(
            f"the layout asks for {config.num_ranks} ranks (data_parallel_replicate {config.data_parallel_replicate} x "
            f"data_parallel_shard {config.data_parallel_shard} x tensor_parallel {config.tensor_parallel}); "
            f"WORLD_SIZE is {world_size}"
        )
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")


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
        load_hf_weights({name: parameter.data for name, parameter in hf_parameters(model)}, config.model)
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
