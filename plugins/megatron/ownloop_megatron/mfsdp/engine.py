"""The megatron_fsdp engine: any causal language model of transformers under Megatron-FSDP's `fully_shard`.

Parameters, gradients and optimizer state are sharded over all ranks (ZeRO-3). AdamW, offload and checkpoints are
the same as in every engine on PyTorch. Megatron-FSDP needs CUDA.

Megatron-FSDP keeps a sharded buffer of parameters per block, in the dtype of computation; one of float32 parameters, if
that is another; and one of gradients. `MainShards` are this rank's views of the float32 buffers, which the optimizer
steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ownloop_megatron.flat_engine import FlatEngine, FlatShards, ShardedModel
from ownloop_megatron.mfsdp._compat import MixedPrecisionPolicy, fully_shard_model
from trainer.config import TrainerConfig
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.pytorch.engine_state import HostMemory
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


def _wrap(policy: TransformersPolicy, mesh: object, config: TrainerConfig, device: torch.device) -> Any:
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


_PREFIX = "model."


class MainShards:
    """The `MasterWeights` of a model under Megatron-FSDP."""

    def __init__(self, wrapper: Any) -> None:
        """`wrapper` is Megatron-FSDP's, around a `TransformersPolicy`."""
        self._wrapper = wrapper
        # The parts are flat: most of a rank's parts begin and end within a parameter.
        self._views: dict[str, Tensor] = {
            name.removeprefix(_PREFIX): parameter.detach().to_local().flatten()
            for name, parameter in wrapper.param_and_grad_buffer.optimizer_named_parameters
        }
        self.parameters = {name: nn.Parameter(view) for name, view in self._views.items()}
        self._storage_bytes: dict[torch.UntypedStorage, int] = {}
        self._host = HostMemory()

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the parameters to `device`. Megatron-FSDP's buffers hold memory only while that is `compute_device`."""
        if device == compute_device:
            for storage, size_bytes in self._storage_bytes.items():
                storage.resize_(size_bytes)
            self._storage_bytes = {}
            for name, view in self._views.items():
                view.copy_(self.parameters[name].data)
                self.parameters[name].data = view
            self.refresh()
            self._wrapper.zero_grad_buffer()
            return
        move = self._host.mover(device)
        for name, view in self._views.items():
            self.parameters[name].data = move(view)
        # Without this argument, parameters outside of blocks would stay whole on the device.
        self._wrapper.all_gather_pipeline.reset(preserve_non_fsdp_units=False)
        self._storage_bytes = {storage: storage.nbytes() for storage in self._storages()}
        for storage in self._storage_bytes:
            storage.resize_(0)

    def refresh(self) -> None:
        """Recasts the parameters of computation after the float32 ones changed."""
        self._wrapper.install_optimized_model_weights()

    def take_gradients(self) -> None:
        """Waits until the gradients of a call are summed over ranks, and moves them to the parameters. A collective."""
        ran = self._wrapper.microbatch_count > 0
        self._wrapper.finish_grad_sync()
        if ran:
            for name, parameter in self._wrapper.param_and_grad_buffer.optimizer_named_parameters:
                if parameter.grad is not None:
                    part = self.parameters[name.removeprefix(_PREFIX)]
                    part.grad = parameter.grad.to_local().flatten().clone()
        self._wrapper.zero_grad_buffer()

    def discard(self) -> None:
        """Frees gathered parameters, and gradients that were not taken. A collective."""
        self._wrapper.finish_grad_sync()
        self._wrapper.zero_grad_buffer()

    def _storages(self) -> list[torch.UntypedStorage]:
        """The memory of Megatron-FSDP's sharded buffers."""
        return [
            buffer.data.untyped_storage()
            for group in self._wrapper.param_and_grad_buffer.parameter_groups
            for buffer in (group.model_weight_buffer, group.main_weight_buffer, group.main_grad_buffer)
            if buffer is not None
        ]
