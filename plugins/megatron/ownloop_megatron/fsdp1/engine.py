"""The fsdp1 engine: any causal language model of transformers under torch's `FullyShardedDataParallel`.

Data parallelism only: sharded, replicated, or both. With one rank nothing is wrapped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from ownloop_megatron.flat_engine import FlatEngine, FlatShards, ShardedModel
from rl.data.packing import PackedRow
from trainer.config import TrainerConfig
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.pytorch.ranks import DTYPES

_WRAPPED = "_fsdp_wrapped_module."


class Fsdp1Engine(FlatEngine):
    """One rank of a transformers model."""

    def _shard(self, policy: TransformersPolicy, config: TrainerConfig, device: torch.device) -> ShardedModel:
        return _build_sharded(policy, config, device)

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        results = super()._score(row, entropy=entropy)
        averaged_over = self._config.num_ranks if self._config.data_parallel_shard == 1 else 1
        if averaged_over > 1:  # turns FSDP's average of the ranks' gradients back into a sum
            for result in results:
                if result is not None and result.requires_grad:
                    result.register_hook(lambda grad: averaged_over * grad)
        return results

    def _handles(self) -> list[Any]:
        """FSDP's handles, one per flattened block."""
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(self._model)
        return [module._handle for module in modules if module._handle is not None]

    def _reshard(self) -> None:
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                handle.reshard(True)

    def zero_grad(self) -> None:
        super().zero_grad()
        for handle in self._handles():  # FSDP would otherwise keep flattened gradients until the next forward pass
            handle._reset_flat_param_grad_info_if_needed()

    def _move_model(self, device: torch.device) -> None:
        if self._shards is None:
            super()._move_model(device)
            return
        for handle in self._handles():
            handle.flat_param_to(device)
            # FSDP reshards to this tensor, which `flat_param_to` leaves on the old device.
            handle.flat_param._local_shard = handle.flat_param.data


def _build_sharded(policy: TransformersPolicy, config: TrainerConfig, device: torch.device) -> ShardedModel:
    """Wraps and loads the model."""
    shapes = {name: parameter.shape for name, parameter in policy.parameters_by_name().items()}
    # Memory pages that were never written to take no memory, and wrapping moves block after block to its device.
    policy.materialize(torch.device("cpu"))
    mesh = init_device_mesh(
        device.type,
        (config.data_parallel_replicate, config.data_parallel_shard),
        mesh_dim_names=("replicate", "shard"),
    )
    wrapper = _wrap(policy, config, mesh, device)
    policy.run_by(wrapper)
    parameters = {
        name.replace(_WRAPPED, "").removeprefix("model."): parameter for name, parameter in wrapper.named_parameters()
    }
    shards = FlatShards(parameters, shapes, mesh)
    shards.load(config)
    return ShardedModel(wrapper, parameters, shards)


def _wrap(
    policy: TransformersPolicy, config: TrainerConfig, mesh: DeviceMesh, device: torch.device
) -> FullyShardedDataParallel:
    """Wraps every block of the model, and the rest of it as one more block.

    With sharding FSDP is made to sum gradients over ranks. Without, they stay averages: each backward pass then reduces
    the whole accumulated gradient again, which leaves an average as it was but would multiply a sum.
    """
    layers = set(policy.layers())
    strategy, used = ShardingStrategy.HYBRID_SHARD, mesh
    if config.data_parallel_replicate == 1:
        strategy, used = ShardingStrategy.FULL_SHARD, mesh["shard"]
    elif config.data_parallel_shard == 1:
        strategy, used = ShardingStrategy.NO_SHARD, mesh["replicate"]
    wrapped = FullyShardedDataParallel(
        policy,
        device_mesh=used,
        sharding_strategy=strategy,
        auto_wrap_policy=CustomPolicy(lambda module: module in layers),
        mixed_precision=MixedPrecision(param_dtype=DTYPES[config.compute_dtype], reduce_dtype=torch.float32),
        device_id=device,
        use_orig_params=True,
    )
    if strategy != ShardingStrategy.NO_SHARD:
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(wrapped)
        for module in modules:
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
    return wrapped
