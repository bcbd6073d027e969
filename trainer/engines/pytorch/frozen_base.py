"""A frozen model and the adapters over it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from rl.lora import LoRAConfig, check_adapter_name
from rl.losses import Loss
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig
from trainer.engines.base import Engine, Microbatch
from trainer.engines.memory import PeakMemory
from trainer.engines.pytorch.adapter_engine import AdapterEngine
from trainer.engines.pytorch.base_identity import base_identity
from trainer.engines.pytorch.engine import TorchEngine


class FrozenBase(Engine):
    """One rank of a frozen model. It scores, and makes adapters, which train."""

    def __init__(self, config: TrainerConfig, engine: Engine) -> None:
        """`engine` holds the model, frozen in `compute_dtype`. A collective, if there can be adapters.

        Adapters need a PyTorch engine; a model without them may be any engine's.
        """
        self._engine = engine
        self._adapters: dict[str, AdapterEngine] = {}
        self._config = config
        self._identity: Mapping[str, str] | None = None
        self._stage = _stage_group(config) if config.lora is not None else None

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def shares_prefixes(self) -> bool:
        return self._engine.shares_prefixes

    @property
    def memory(self) -> PeakMemory:
        return self._engine.memory

    def adapter(self, name: str, config: LoRAConfig) -> Engine:
        if self._config.lora is None:
            self._refuse("adapter")
        check_adapter_name(name)
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already; drop it first, or choose another name")
        assert isinstance(self._engine, TorchEngine), "only PyTorch engines have `trains_adapters` in their rows"
        AdapterEngine.check(self._engine, config)
        self._identity = self._identity or base_identity(self._config.model)
        self._adapters[name] = AdapterEngine(self._engine, config, self._identity, self._stage)
        return self._adapters[name]

    def drop_adapter(self, name: str) -> None:
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}; there are {sorted(self._adapters)}")
        self._adapters.pop(name).close()

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        self._engine.hooks = self.hooks
        return self._engine.forward(microbatches, entropy=entropy)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        del microbatches, loss
        self._refuse("forward_backward")

    def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        del params, grad_scale
        self._refuse("optim_step")

    def zero_grad(self) -> None:
        """Does nothing, because there is no gradient."""

    def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        self._engine.to(device, model=model, gradients=gradients, optimizer=optimizer)

    def train_mode(self) -> AbstractContextManager[None]:
        return self._engine.train_mode()

    def eval_mode(self) -> AbstractContextManager[None]:
        return self._engine.eval_mode()

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._engine.hf_parameters()

    def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        del path, asynchronous, keep_last
        self._refuse("save_checkpoint")

    def wait_for_checkpoint(self) -> None:
        """Does nothing, because none is written."""

    def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        del path, weights_only
        self._refuse("load_checkpoint")

    def export_hf(self, path: Path, dtype: torch.dtype) -> None:
        self._engine.export_hf(path, dtype)

    def export_peft(self, path: Path, dtype: torch.dtype) -> None:
        del path, dtype
        self._refuse("export_peft")

    def _refuse(self, verb: str) -> NoReturn:
        if self._config.lora is None:
            raise ValueError(f"{verb}: the model is frozen; without TrainerConfig.frozen, it is trained")
        raise ValueError(
            f"{verb}: the model is frozen (TrainerConfig.lora); call it on an adapter, which `adapter` makes"
        )


def _stage_group(config: TrainerConfig) -> dist.ProcessGroup | None:
    """The ranks that hold the same layers as this one, which are consecutive, or None if there is no other."""
    size = config.num_ranks // config.pipeline_parallel
    if size == 1:
        return None
    if config.pipeline_parallel == 1:
        return dist.group.WORLD
    group: Any = dist.new_subgroups(size)[0]
    return group
