"""What the engines have in common that shard a transformers model into stretches of flattened parameters.

FSDP1 and Megatron-FSDP flatten a block's parameters into one vector and cut that into equal stretches. A rank's part of
a parameter is therefore a stretch of the flattened parameter and no rectangle, so a DTensor cannot describe it.
`FlatShards` gathers parameters that leave the engine whole, each on one rank, and every rank gathers about as many
elements.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.data.packing import PackedRow
from trainer.config import TrainerConfig
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.engine_state import MasterWeights
from trainer.engines.pytorch.hf_directory import load_hf_weights
from trainer.engines.pytorch.ranks import DTYPES, choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows


class FlatShards:
    """Knows which part of every parameter each rank holds. Every method is a collective.

    Each parameter has one owner, the rank that holds it whole when it has been gathered. Owners are chosen so that each
    rank gathers about as many elements.
    """

    def __init__(self, parameters: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], mesh: DeviceMesh) -> None:
        """`parameters` are this rank's parts, which concatenated over ranks make up the flattened parameters.

        `shapes` are of the whole parameters; the axes of `mesh` are `replicate` and `shard`.
        """
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
        """Fills this rank's parts from the model's files. Holds one whole parameter at a time."""
        for name, parameter in self._parameters.items():
            whole = torch.empty(self._shapes[name])
            load_hf_weights({name: whole}, config.model)
            parameter.copy_(self._part(name, whole, parameter))

    def any_rank(self, flags: Mapping[str, bool]) -> dict[str, bool]:
        """Whether each flag is true on any rank."""
        device = next(iter(self._parameters.values())).device
        values = torch.tensor([float(flag) for flag in flags.values()], device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return dict(zip(flags, (bool(value) for value in values.tolist()), strict=True))

    def gather(self, name: str, part: Tensor | None) -> Tensor | None:
        """Puts a tensor together from the ranks' parts, of which None stands for zeros.

        Returns the whole tensor on its owner and None on every other rank.
        """
        device = self._parameters[name].device if part is None else part.device
        whole = torch.zeros(self._shapes[name].numel(), device=device)
        if part is not None:
            start = self._starts[name]
            whole[start : start + part.numel()] = part.flatten()
        # Each element is zero on all ranks but one, so the sum is exact.
        dist.reduce(whole, dist.get_global_rank(self._group, self._owners[name]), group=self._group)
        return whole.view(self._shapes[name]) if self._is_owner(name) else None

    def gather_all(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gathers all tensors. Returns the ones that this rank owns."""
        gathered = {name: self.gather(name, part) for name, part in parts.items()}
        return {name: whole for name, whole in gathered.items() if whole is not None}

    def gather_moments(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Gathers `Optimizer.state`. Returns the state of the parameters that this rank owns."""
        steps = torch.stack([state["step"] for state in states.values()])
        # A rank whose part of a parameter is empty has no gradient for it and counts no steps.
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self._group)
        moments = {
            key: self.gather_all({name: s[key] for name, s in states.items()}) for key in ("exp_avg", "exp_avg_sq")
        }
        return {
            name: {"step": step.clone(), **{key: of_all[name] for key, of_all in moments.items()}}
            for name, step in zip(states, steps, strict=True)
            if self._is_owner(name)
        }

    def scatter_all(self, wholes: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Fills this rank's parts from the whole tensors that their owners hold."""
        for name, part in parts.items():
            whole = wholes[name] if name in wholes else torch.empty(self._shapes[name], device=part.device)
            part.copy_(self._part(name, self._broadcast(name, whole), part))

    def scatter_moments(
        self, wholes: Mapping[str, Mapping[str, Tensor]], states: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Fills the `Optimizer.state` of this rank's parts from the state that the owners hold."""
        for key in ("exp_avg", "exp_avg_sq"):
            self.scatter_all({name: s[key] for name, s in wholes.items()}, {name: s[key] for name, s in states.items()})
        for name, state in states.items():
            step = wholes[name]["step"] if name in wholes else state["step"].clone()
            state["step"].copy_(self._broadcast(name, step))

    def _is_owner(self, name: str) -> bool:
        return self._first_replica and self._owners[name] == self._rank

    def _broadcast(self, name: str, whole: Tensor) -> Tensor:
        """Sends the owner's tensor to every rank. The owner is in the first replica, whose ranks come first."""
        dist.broadcast(whole, src=self._owners[name])
        return whole

    def _part(self, name: str, whole: Tensor, part: Tensor) -> Tensor:
        start = self._starts[name]
        return whole.flatten()[start : start + part.numel()].view_as(part)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model after sharding, with its weights loaded."""

    wrapper: nn.Module
    """Runs the policy."""
    parameters: Mapping[str, nn.Parameter]
    """This rank's parts, float32, by Hugging Face name."""
    shards: FlatShards
    masters: MasterWeights | None = None
    """Given if the wrapper computes with copies of the parameters."""


class FlatEngine(TorchEngine):
    """One rank of a transformers model. With one rank the model stays as it is, unless the subclass wraps it too."""

    wraps_one_rank = False

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        device = choose_device()
        torch.manual_seed(config.seed)
        wraps = config.num_ranks > 1 or self.wraps_one_rank
        init_process_group(config, device, alone=wraps)
        self._policy = TransformersPolicy(config.model, config.head, DTYPES[config.compute_dtype], config.head_dtype)
        if config.activation_checkpointing == "full":
            self._policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.frozen and not wraps:
            self._policy.freeze(DTYPES[config.compute_dtype])
        model: nn.Module = self._policy
        masters: MasterWeights | None = None
        self._shards: FlatShards | None = None
        if wraps:
            sharded = self._shard(self._policy, config, device)
            model, parameters, masters = sharded.wrapper, sharded.parameters, sharded.masters
            self._shards = sharded.shards
        else:
            parameters = self._policy.load(config.model, device)
        info = describe_model(config.model, config.head)
        rows = SequentialRows(self._score, config.num_ranks, device)
        replicas = config.data_parallel_replicate
        super().__init__(config, model, parameters, info, device, rows, replicas=replicas, masters=masters)
        self._policy.check(device)
        self._reshard()

    @abstractmethod
    def _shard(self, policy: TransformersPolicy, config: TrainerConfig, device: torch.device) -> ShardedModel:
        """Hook: wraps and loads the model, whose parameters are on the meta device."""

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        return self._policy.score(row, self._device, entropy=entropy)

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

    def _state(self, *, optimizer: bool) -> dict[str, object]:
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
