"""`PolicyTrainer`: one rank of the trainer, in its own process. The engine does the mathematics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from monarch.actor import Actor, endpoint

from rl.hardware import cpu_malloc_env
from rl.losses import Loss
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput, WeightTransport
from rl.weights.manifest import VersionRecord
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Microbatch
from trainer.heap import Heap
from trainer.push import WeightPublisher

WeightDtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes that a generator may serve."""


def trainer_env(config: TrainerConfig) -> dict[str, str]:
    """Environment variables of each trainer process, to be set before it imports anything."""
    env = {
        "OMP_NUM_THREADS": str(config.num_threads),
        # Spinning threads stall each other when ranks, or a generator, share the cores.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if not torch.cuda.is_available():
        env |= cpu_malloc_env()  # saves a quarter of the time of a small model's step
    return env


class PolicyTrainer(Actor):
    """The endpoints of one rank. Every rank of a mesh gets the same calls in the same order."""

    def __init__(self, config: TrainerConfig, generator_dtype: WeightDtype | None, transport: WeightTransport) -> None:
        """Builds the engine. `generator_dtype` is that of pushes and exports, by default `compute_dtype`."""
        self._engine = load_engine(config)
        self._dtype: torch.dtype = getattr(torch, generator_dtype or config.compute_dtype)
        self._publisher = WeightPublisher(self._dtype, transport)
        self._heap = None if torch.cuda.is_available() else Heap()

    @endpoint
    async def policy_version(self) -> int:
        """Optimizer steps applied so far."""
        return self._engine.policy_version

    @endpoint
    async def shares_prefixes(self) -> bool:
        """`Engine.shares_prefixes`."""
        return self._engine.shares_prefixes

    @endpoint
    async def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        """`Engine.forward_backward` on this rank's local batch."""
        return self._engine.forward_backward(microbatches, loss)

    @endpoint
    async def forward(self, microbatches: Sequence[Microbatch], entropy: bool) -> ForwardBackwardOutput:
        """`Engine.forward` on this rank's local batch."""
        return self._engine.forward(microbatches, entropy=entropy)

    @endpoint
    async def optim_step(self, params: AdamParams, grad_scale: float) -> OptimStepOutput:
        """`Engine.optim_step`."""
        output = self._engine.optim_step(params, grad_scale)
        if self._heap is not None:
            self._heap.after_step()
        return output

    @endpoint
    async def zero_grad(self) -> None:
        """`Engine.zero_grad`."""
        self._engine.zero_grad()

    @endpoint
    async def to(self, device: str, model: bool, gradients: bool, optimizer: bool) -> None:
        """`Engine.to`."""
        self._engine.to(device, model=model, gradients=gradients, optimizer=optimizer)

    @endpoint
    async def push_model_state_dict(self) -> VersionRecord | None:
        """Publishes the current weights in the generator's dtype; `WeightPublisher.publish` says what it returns."""
        with self._engine.memory.phase("push_model_state_dict"):
            return await self._publisher.publish(self._engine.policy_version, self._engine.hf_parameters())

    @endpoint
    async def save_checkpoint(self, path: Path, asynchronous: bool, keep_last: int | None) -> None:
        """`Engine.save_checkpoint`."""
        with self._engine.memory.phase("save_checkpoint"):
            self._engine.save_checkpoint(path, asynchronous=asynchronous, keep_last=keep_last)

    @endpoint
    async def wait_for_checkpoint(self) -> None:
        """`Engine.wait_for_checkpoint`."""
        self._engine.wait_for_checkpoint()

    @endpoint
    async def load_checkpoint(self, path: Path, weights_only: bool) -> int:
        """`Engine.load_checkpoint`."""
        with self._engine.memory.phase("load_checkpoint"):
            return self._engine.load_checkpoint(path, weights_only=weights_only)

    @endpoint
    async def export_hf(self, path: Path) -> None:
        """`Engine.export_hf` in the generator's dtype."""
        with self._engine.memory.phase("export_hf"):
            self._engine.export_hf(path, self._dtype)
