"""What the engines have in common that shard a transformers model into stretches of flattened parameters.

Such shards are no DTensors, so parameters that leave the engine are gathered whole (`flat_shards.py`), each on one
rank, and every rank gathers about as many elements.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.data.packing import PackedRow
from trainer.config import TrainerConfig
from trainer.engines.hf.flat_shards import FlatShards
from trainer.engines.hf.transformers_policy import TransformersPolicy
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.engine_state import MasterWeights
from trainer.engines.pytorch.ranks import DTYPES, choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model after sharding, with its weights loaded."""

    wrapper: nn.Module
    """Runs the policy."""
    parameters: Mapping[str, nn.Parameter]
    """This rank's parts, float32, by Hugging Face name."""
    shards: FlatShards
    masters: MasterWeights | None = None
    """Given if the parameters are not those that the wrapper computes with."""


class FlatEngine(TorchEngine):
    """One rank of a transformers model. With one rank the model stays as it is, unless the subclass wraps it too."""

    wraps_one_rank = False

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        device = choose_device()
        torch.manual_seed(config.seed)
        wraps = config.num_ranks > 1 or self.wraps_one_rank
        init_process_group(config, device, alone=wraps)
        self._policy = TransformersPolicy(config.model, config.head, DTYPES[config.compute_dtype])
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

    @property
    def shares_prefixes(self) -> bool:
        return False

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
