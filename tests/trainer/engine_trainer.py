"""An engine in the test's own process as the `Trainer` that a loop sees: no mesh, the same mathematics."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl.data.batching import validate_batch
from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.protocols import Trainer
from rl.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig
from trainer.engines import load_engine


class EngineTrainer:
    """Cuts every batch into micro-batches of `per_microbatch` datums, in order."""

    def __init__(self, model: Path, per_microbatch: int = 3, **options: Any) -> None:
        self.engine = load_engine(TrainerConfig(model=model, compute_dtype="float32", **options))
        self._base = self.engine
        self._name = ""
        self._per_microbatch = per_microbatch

    async def policy_version(self) -> int:
        return self.engine.policy_version

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, object] | None = None
    ) -> ForwardBackwardOutput:
        checked = get_loss(loss, loss_config)
        return self.engine.forward_backward(self._cut(checked.prepared(batch), checked.required_inputs), checked)

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        return self.engine.forward(self._cut(batch, ()), entropy=entropy)

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        return self.engine.optim_step(params, grad_scale)

    async def zero_grad(self) -> None:
        self.engine.zero_grad()

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        self.engine.to(device, model=model, gradients=gradients, optimizer=optimizer)

    async def push_model_state_dict(self) -> int:
        """Nobody pulls from it."""
        return self.engine.policy_version

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        self.engine.save_checkpoint(path, asynchronous=asynchronous, keep_last=keep_last)

    async def wait_for_checkpoint(self) -> None:
        self.engine.wait_for_checkpoint()

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        return self.engine.load_checkpoint(path, weights_only=weights_only)

    async def export_hf(self, path: Path) -> None:
        self.engine.export_hf(path, torch.float32)

    async def adapter(self, name: str, config: LoRAConfig) -> "Trainer":
        adapter = copy.copy(self)
        adapter.engine, adapter._base, adapter._name = self._base.adapter(name, config), self._base, name
        return adapter

    async def drop(self) -> None:
        self._base.drop_adapter(self._name)

    async def export_peft(self, path: Path) -> None:
        self.engine.export_peft(path, torch.float32)

    def _cut(self, batch: Sequence[Datum], required_inputs: Sequence[str]) -> list[Sequence[Datum]]:
        validate_batch(batch, required_inputs=required_inputs, vocab_size=1 << 20, max_seq_len=1 << 20)
        return [batch[i : i + self._per_microbatch] for i in range(0, len(batch), self._per_microbatch)]
