"""The fsdp1 engine: any causal language model of transformers under torch's `FullyShardedDataParallel`.

Data parallelism only, sharded, replicated, or both. With one rank nothing is wrapped. A rank holds a stretch of each
flattened block, so a part of a parameter that is no rectangle: what leaves the engine by name is put together whole,
parameter by parameter, each by one owner, so that every rank has its share of the model and none all of it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from rl.data.packing import PackedRow
from trainer.config import TrainerConfig
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.hf_weights import load_hf_weights
from trainer.engines.pytorch.ranks import DTYPES, choose_device, init_process_group

_WRAPPED = "_fsdp_wrapped_module."


class Fsdp1Engine(TorchEngine):
    """One rank of a transformers model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        self._policy = TransformersPolicy(config.model, config.head)
        if config.activation_checkpointing == "full":
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        model: nn.Module = self._policy
        self._averaged_over = config.num_ranks if config.data_parallel_shard == 1 else 1
        self._shards: _Shards | None = None
        shapes = {name: parameter.shape for name, parameter in self._policy.parameters_by_name().items()}
        if config.num_ranks > 1:
            # Pages that nobody writes to take no memory; wrapping moves block after block to its device.
            self._policy.materialize(torch.device("cpu"))
            mesh = init_device_mesh(
                device.type,
                (config.data_parallel_replicate, config.data_parallel_shard),
                mesh_dim_names=("replicate", "shard"),
            )
            model = _wrap(self._policy, config, mesh, device)
            self._policy.run_by(model)
            parameters = {
                name.replace(_WRAPPED, "").removeprefix("model."): parameter
                for name, parameter in model.named_parameters()
            }
            self._shards = _Shards(parameters, shapes, mesh)
            self._shards.load(config)
        else:
            self._policy.materialize(device)
            parameters = self._policy.parameters_by_name()
            with torch.no_grad():
                load_hf_weights({name: parameter.data for name, parameter in parameters.items()}, config.model)
        info = describe_model(config.model, config.head)
        super().__init__(config, model, parameters, info, device, replicas=config.data_parallel_replicate)
        self._policy.check(device)
        self._reshard()

    @property
    def shares_prefixes(self) -> bool:
        return False

    def zero_grad(self) -> None:
        super().zero_grad()
        for handle in self._handles():  # flattened gradients would otherwise live until the next forward pass
            handle._reset_flat_param_grad_info_if_needed()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        if self._shards is None:
            yield from super().hf_parameters()
            return
        has_grad = self._shards.any_rank({name: p.grad is not None for name, p in self._parameters.items()})
        for name, parameter in self._parameters.items():
            whole = self._shards.gather(name, parameter.detach())
            grad = self._shards.gather(name, parameter.grad) if has_grad[name] else None
            if whole is not None:
                whole.grad = grad
                yield name, whole

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        results = self._policy.score(
            self._tensor(row.tokens)[None],
            self._tensor(row.positions)[None],
            self._tensor(row.scored),
            self._tensor(row.loss_inputs["target_tokens"]),
            entropy=entropy,
        )
        if self._averaged_over > 1:
            for result in results:
                if result is not None and result.requires_grad:
                    result.register_hook(lambda grad: self._averaged_over * grad)
        return results

    def _handles(self) -> list[Any]:
        """One per flattened block."""
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(self._model)
        return [module._handle for module in modules if module._handle is not None]

    def _reshard(self) -> None:
        for handle in self._handles():
            if handle.uses_sharded_strategy:
                handle.reshard(True)

    def _move_model(self, device: torch.device) -> None:
        if self._shards is None:
            super()._move_model(device)
            return
        self._reshard()
        for handle in self._handles():
            handle.flat_param_to(device)
            handle.flat_param._local_shard = handle.flat_param.data

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        state = super()._state(optimizer=optimizer)
        if self._shards is None:
            return state
        state["model"] = self._shards.gather_all(state["model"])
        if optimizer:
            state["optimizer"] = self._shards.gather_moments(state["optimizer"])
        return state

    def _take_over(self, state: Mapping[str, Any]) -> None:
        if self._shards is None:
            return
        self._shards.scatter_all(state["model"], {name: p.detach() for name, p in self._parameters.items()})
        if "optimizer" in state:
            self._shards.scatter_moments(state["optimizer"], self._optimizer.state())


class _Shards:
    """Which part of every parameter each rank holds, and the way from parts to whole parameters and back.

    Every method is a collective. Whole parameters exist with their owners only, one rank each.
    """

    def __init__(self, parameters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], mesh: DeviceMesh) -> None:
        """`parameters` are this rank's parts; flattened and in the order of ranks they make up the parameters."""
        self._shapes = shapes
        self._group = mesh["shard"].get_group()
        self._rank = mesh["shard"].get_local_rank()
        self._first_replica = mesh["replicate"].get_local_rank() == 0
        self._parameters = parameters
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        of_ranks: list[dict[str, int]] = [{} for _ in range(mesh["shard"].size())]
        dist.all_gather_object(of_ranks, sizes, group=self._group)
        self._starts = {name: sum(of_rank[name] for of_rank in of_ranks[: self._rank]) for name in parameters}
        self._owners: dict[str, int] = {}
        loads = [0] * len(of_ranks)
        for name in parameters:
            self._owners[name] = loads.index(min(loads))
            loads[self._owners[name]] += shapes[name].numel()

    @torch.no_grad()
    def load(self, config: TrainerConfig) -> None:
        """Fills this rank's parts from the files of the model, one whole parameter at a time."""
        for name, parameter in self._parameters.items():
            whole = torch.empty(self._shapes[name])
            load_hf_weights({name: whole}, config.model)
            parameter.copy_(self._part(name, whole, parameter))

    def any_rank(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """Whether a flag holds on any rank."""
        device = next(iter(self._parameters.values())).device
        values = torch.tensor([float(flag) for flag in flags.values()], device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(flags, (bool(value) for value in values.tolist()), strict=True))

    def gather(self, name: str, part: Tensor | None) -> Tensor | None:
        """The whole of what this rank has a part of (None is a part of zeros); None for all but its owner."""
        device = self._parameters[name].device if part is None else part.device
        whole = torch.zeros(self._shapes[name].numel(), device=device)
        if part is not None:
            start = self._starts[name]
            whole[start : start + part.numel()] = part.flatten()
        # Adding zeros is exact.
        dist.reduce(whole, dist.get_global_rank(self._group, self._owners[name]), group=self._group)
        return whole.view(self._shapes[name]) if self._is_owner(name) else None

    def gather_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors that this rank owns."""
        gathered = {name: self.gather(name, part) for name, part in parts.items()}
        return {name: whole for name, whole in gathered.items() if whole is not None}

    def gather_moments(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """`Optimizer.state` of the parts -> of the whole parameters that this rank owns."""
        steps = torch.stack([state["step"] for state in states.values()])
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self._group)  # who has nothing of a parameter takes no step
        moments = {
            key: self.gather_all({name: s[key] for name, s in states.items()}) for key in ("exp_avg", "exp_avg_sq")
        }
        return {
            name: {"step": step.clone(), **{key: of_all[name] for key, of_all in moments.items()}}
            for name, step in zip(states, steps, strict=True)
            if self._is_owner(name)
        }

    def scatter_all(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Fills this rank's parts from the whole tensors of their owners."""
        for name, part in parts.items():
            whole = wholes[name] if name in wholes else torch.empty(self._shapes[name], device=part.device)
            part.copy_(self._part(name, self._broadcast(name, whole), part))

    def scatter_moments(
        self, wholes: Mapping[str, Mapping[str, Tensor]], states: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Fills the `Optimizer.state` of this rank's parts."""
        for key in ("exp_avg", "exp_avg_sq"):
            self.scatter_all({name: s[key] for name, s in wholes.items()}, {name: s[key] for name, s in states.items()})
        for name, state in states.items():
            step = wholes[name]["step"] if name in wholes else state["step"].clone()
            state["step"].copy_(self._broadcast(name, step))

    def _is_owner(self, name: str) -> bool:
        return self._first_replica and self._owners[name] == self._rank

    def _broadcast(self, name: str, whole: Tensor) -> Tensor:
        """The tensor of the first replica's owner, on every rank; `owners` count along the first replica."""
        dist.broadcast(whole, src=self._owners[name])
        return whole

    def _part(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        start = self._starts[name]
        return whole.flatten()[start : start + part.numel()].view_as(part)


def _wrap(
    policy: TransformersPolicy, config: TrainerConfig, mesh: DeviceMesh, device: torch.device
) -> FullyShardedDataParallel:
    """Wraps every block of the model and, as one more, what lies outside of them.

    Without sharding every backward pass reduces what has accumulated once more, which leaves averages, but not sums, as
    they were; so gradients are averages then.
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
    if strategy != ShardingStrategy.NO_SHARD:  # gradients are plain sums
        modules: list[Any] = FullyShardedDataParallel.fsdp_modules(wrapped)
        for module in modules:
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
    return wrapped
