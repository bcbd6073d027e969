"""The fsdp1 engine: any causal language model of transformers under torch's `FullyShardedDataParallel`.

Data parallelism only: sharded, replicated, or both. With one rank nothing is wrapped. FSDP1's shards are no DTensors,
so parameters that leave the engine are gathered whole (`flat_shards.py`), each on one rank, and every rank gathers
about as many elements.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from rl.data.packing import PackedRow
from trainer.config import TrainerConfig
from trainer.engines.hf.flat_shards import FlatShards
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.hf_weights import load_hf_weights
from trainer.engines.pytorch.ranks import DTYPES, choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows

_WRAPPED = "_fsdp_wrapped_module."


class Fsdp1Engine(TorchEngine):
    """One rank of a transformers model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        self._policy = TransformersPolicy(config.model, config.head, DTYPES[config.compute_dtype])
        if config.activation_checkpointing == "full":
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.frozen and config.num_ranks == 1:
            self._policy.freeze(DTYPES[config.compute_dtype])
        model: nn.Module = self._policy
        self._averaged_over = config.num_ranks if config.data_parallel_shard == 1 else 1
        self._shards: FlatShards | None = None
        if config.num_ranks > 1:
            model, self._shards, parameters = _build_sharded(self._policy, config, device)
        else:
            self._policy.materialize(device)
            parameters = self._policy.parameters_by_name()
            with torch.no_grad():
                load_hf_weights({name: parameter.data for name, parameter in parameters.items()}, config.model)
        info = describe_model(config.model, config.head)
        rows = SequentialRows(self._score, config.num_ranks, device)
        super().__init__(config, model, parameters, info, device, rows, replicas=config.data_parallel_replicate)
        self._policy.check(device)
        self._reshard()

    @property
    def shares_prefixes(self) -> bool:
        return False

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        results = self._policy.score(row, self._device, entropy=entropy)
        if self._averaged_over > 1:  # turns FSDP's average of the ranks' gradients back into a sum
            for result in results:
                if result is not None and result.requires_grad:
                    result.register_hook(lambda grad: self._averaged_over * grad)
        return results

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        if self._shards is None:
            yield from self._parameters.items()
            return
        has_grad = self._shards.any_rank({name: p.grad is not None for name, p in self._parameters.items()})
        for name, parameter in self._parameters.items():
            whole = self._shards.gather(name, parameter.detach())
            grad = self._shards.gather(name, parameter.grad) if has_grad[name] else None
            if whole is not None:
                whole.grad = grad
                yield name, whole

    def _handles(self) -> list[Any]:
        """FSDP's handles, one per flattened block."""
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(self._model)
        return [module._handle for module in modules if module._handle is not None]

    def _reshard(self) -> None:
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                handle.reshard(True)

    def _free_flat_gradients(self) -> None:
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

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        state = super()._state(optimizer=optimizer)
        if self._shards is None:
            return state
        state["model"] = self._shards.gather_all(state["model"])
        if optimizer:
            state["optimizer"] = self._shards.gather_moments(state["optimizer"])
        return state

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        if self._shards is None:
            return
        self._shards.scatter_all(state["model"], {name: p.detach() for name, p in self._parameters.items()})
        if "optimizer" in state:
            self._shards.scatter_moments(state["optimizer"], self._optimizer.state())


def _build_sharded(
    policy: TransformersPolicy, config: TrainerConfig, device: torch.device
) -> tuple[FullyShardedDataParallel, FlatShards, dict[str, nn.Parameter]]:
    """Wraps and loads the model. Returns its wrapper, its shards and this rank's parts of the parameters by name."""
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
    return wrapper, shards, parameters


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
