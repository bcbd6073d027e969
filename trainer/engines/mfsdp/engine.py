"""The megatron_fsdp engine: any causal language model of transformers under Megatron-FSDP's `fully_shard`.

Parameters, gradients and optimizer state are sharded over all ranks (ZeRO-3). AdamW, offload and
checkpoints are those of every engine on PyTorch. Megatron-FSDP needs CUDA.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trainer.config import TrainerConfig
from trainer.engines.hf.flat_engine import FlatEngine, ShardedModel
from trainer.engines.hf.flat_shards import FlatShards
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.mfsdp.mfsdp_api import MixedPrecisionPolicy, fully_shard_model
from trainer.engines.mfsdp.mfsdp_shards import MainShards
from trainer.engines.pytorch.ranks import DTYPES


class MegatronFsdpEngine(FlatEngine):
    """One rank of a transformers model."""

    wraps_one_rank = True

    def _shard(self, policy: TransformersPolicy, config: TrainerConfig, device: torch.device) -> ShardedModel:
        shapes = {name: parameter.shape for name, parameter in policy.parameters_by_name().items()}
        for parameter in policy.parameters():
            parameter.data = parameter.data.to(DTYPES[config.compute_dtype])
        policy.materialize(device)
        # Megatron-FSDP wants an axis of tensor parallelism, if only of one rank, and `FlatShards` one of replicas.
        mesh = init_device_mesh(
            device.type, (1, dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard", "tensor")
        )
        wrapper = _wrap(policy, mesh["shard", "tensor"], config, device)
        policy.run_by(wrapper)
        self._main = MainShards(wrapper)
        shards = FlatShards(self._main.parameters, shapes, mesh)
        shards.load(config)
        self._main.refresh()
        return ShardedModel(wrapper, self._main.parameters, shards, self._main)

    def _reduce_gradients(self) -> None:
        self._main.take_gradients()

    def _reshard(self) -> None:
        self._main.discard()


def _wrap(policy: TransformersPolicy, mesh: Any, config: TrainerConfig, device: torch.device) -> Any:
    """Shards every block of the model, and the rest of it as one more block.

    Raises ValueError for a model that names no blocks.
    """
    blocks = {type(layer) for layer in policy.layers()}
    if not blocks:
        raise ValueError(
            f"engine 'megatron_fsdp' shards block by block, and {type(policy.model).__name__} names none in "
            "_no_split_modules; the engine 'fsdp2' shards it"
        )
    precision = MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32
    )
    wrapper = fully_shard_model(
        policy,
        device_mesh=mesh,
        dp_shard_dim="shard",
        tp_dim="tensor",
        fsdp_unit_modules=list(blocks),
        device=device,
        mixed_precision_policy=precision,
        calculate_per_token_loss=True,  # gradients are sums over ranks
        sync_model_each_microbatch=False,  # sums of a call's rows stay with Megatron-FSDP until the call ends
        **config.engine_args,
    )
    rest = [
        parameter
        for group in wrapper.param_and_grad_buffer.parameter_groups
        if group.fsdp_unit_id is None
        for parameter in group.params
    ]
    # The output projection's weight is used without a forward pass of its module, at which it would be gathered.
    policy.register_forward_pre_hook(lambda *_: wrapper.all_gather_and_wait_parameters_ready(rest))
    return wrapper
