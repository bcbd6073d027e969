"""`PolicyTrainer`: one rank of the trainer, in its own process. The engine does the mathematics."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from monarch.actor import Actor, endpoint

from rl.lora import LoRAConfig
from rl.losses import Loss
from rl.system.hardware import Heap, without_garbage_collection
from rl.types import AdamParams, ForwardBackwardOutput, OptimStepOutput, WeightTransport
from rl.weights.version import VersionRecord
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine, Microbatch
from trainer.engines.pytorch.ranks import choose_device
from trainer.matrix_rate import matrix_rate
from trainer.push import WeightPublisher

WeightDtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes that a generator may serve."""

ADAPTER_FOLDER = "adapter"
"""The folder, within the directory of a merged model, that holds the adapter itself."""


@dataclass(frozen=True, slots=True)
class PublishedEngine:
    """What a rank holds for each of its policies."""

    engine: Engine
    publisher: WeightPublisher


class PolicyTrainer(Actor):
    """The endpoints of one rank. Every rank of a mesh gets the same calls in the same order.

    `policy` is the adapter that a call is about; None is the model itself, which is frozen if there are adapters.
    """

    def __init__(
        self,
        config: TrainerConfig,
        generator_dtype: WeightDtype | None,
        transport: WeightTransport,
        store_name: str | None = None,
    ) -> None:
        """Builds the engine. `generator_dtype` is that of pushes and exports, by default `compute_dtype`.

        Pushes are published in the TorchStore that is named `store_name`.
        """
        self._dtype: torch.dtype = getattr(torch, generator_dtype or config.compute_dtype)
        self._transport: WeightTransport = transport
        self._store_name = store_name
        self._compute_dtype, self._profiled = config.compute_dtype, config.profile_steps
        with without_garbage_collection():
            self._policies: dict[str | None, PublishedEngine] = {None: self._published(load_engine(config))}
        self._heap = None if torch.cuda.is_available() else Heap()

    def _published(self, engine: Engine, policy: str | None = None, lora: LoRAConfig | None = None) -> PublishedEngine:
        if self._profiled:
            from trainer.step_profile import profile_steps  # takes a while, and few runs are profiled

            profile_steps(engine, self._profiled)
        publisher = WeightPublisher(self._dtype, self._transport, policy=policy, lora=lora, store_name=self._store_name)
        return PublishedEngine(engine, publisher)

    @endpoint
    async def adapter(self, name: str, config: LoRAConfig) -> None:
        """`Engine.adapter`. Later calls find the adapter under its name."""
        self._policies[name] = self._published(self._policies[None].engine.adapter(name, config), name, config)

    @endpoint
    async def drop(self, policy: str) -> None:
        """`Engine.drop_adapter`. Withdraws what the adapter published."""
        self._policies[None].engine.drop_adapter(policy)
        await self._policies.pop(policy).publisher.close()

    @endpoint
    async def policy_version(self, policy: str | None) -> int:
        """Optimizer steps applied so far."""
        return self._policies[policy].engine.policy_version

    @endpoint
    async def start(self) -> bool:
        """Answers `Engine.shares_prefixes` once the engine is built."""
        return self._policies[None].engine.shares_prefixes

    @endpoint
    async def matrix_rate(self) -> float:
        """Operations a second that this rank's device can do; see `trainer.matrix_rate`."""
        return matrix_rate(choose_device(), self._compute_dtype)

    @endpoint
    async def forward_backward(
        self, policy: str | None, microbatches: Sequence[Microbatch], loss: Loss
    ) -> ForwardBackwardOutput:
        """`Engine.forward_backward` on this rank's local batch."""
        return self._policies[policy].engine.forward_backward(microbatches, loss)

    @endpoint
    async def forward(
        self, policy: str | None, microbatches: Sequence[Microbatch], entropy: bool
    ) -> ForwardBackwardOutput:
        """`Engine.forward` on this rank's local batch."""
        return self._policies[policy].engine.forward(microbatches, entropy=entropy)

    @endpoint
    async def optim_step(self, policy: str | None, params: AdamParams, grad_scale: float) -> OptimStepOutput:
        """`Engine.optim_step`."""
        output = self._policies[policy].engine.optim_step(params, grad_scale)
        if self._heap is not None:
            self._heap.after_step()
        return output

    @endpoint
    async def zero_grad(self, policy: str | None) -> None:
        """`Engine.zero_grad`."""
        self._policies[policy].engine.zero_grad()

    @endpoint
    async def to(self, policy: str | None, device: str, model: bool, gradients: bool, optimizer: bool) -> None:
        """`Engine.to`."""
        self._policies[policy].engine.to(device, model=model, gradients=gradients, optimizer=optimizer)

    @endpoint
    async def push_model_state_dict(self, policy: str | None) -> VersionRecord | None:
        """Publishes the current weights in the generator's dtype; see `WeightPublisher.publish`."""
        engine, publisher = self._policies[policy].engine, self._policies[policy].publisher
        with engine.memory.phase("push_model_state_dict"):
            record = await publisher.publish(engine.policy_version, engine.hf_parameters(), engine.frozen_names)
        return None if record is None else replace(record, arithmetic=self._policies[None].engine.arithmetic)

    @endpoint
    async def save_checkpoint(self, policy: str | None, path: Path, asynchronous: bool, keep_last: int | None) -> None:
        """`Engine.save_checkpoint`."""
        engine = self._policies[policy].engine
        with engine.memory.phase("save_checkpoint"):
            engine.save_checkpoint(path, asynchronous=asynchronous, keep_last=keep_last)

    @endpoint
    async def wait_for_checkpoint(self, policy: str | None) -> None:
        """`Engine.wait_for_checkpoint`."""
        self._policies[policy].engine.wait_for_checkpoint()

    @endpoint
    async def load_checkpoint(self, policy: str | None, path: Path, weights_only: bool) -> int:
        """`Engine.load_checkpoint`."""
        engine = self._policies[policy].engine
        self._policies[policy].publisher.forget_frozen()
        with engine.memory.phase("load_checkpoint"):
            return engine.load_checkpoint(path, weights_only=weights_only)

    @endpoint
    async def export_hf(self, policy: str | None, path: Path) -> None:
        """`Engine.export_hf` in the generator's dtype, and an adapter's `Engine.export_peft` to `adapter` within it."""
        engine = self._policies[policy].engine
        with engine.memory.phase("export_hf"):
            engine.export_hf(path, self._dtype)
            if policy is not None:
                engine.export_peft(path / ADAPTER_FOLDER, torch.float32)

    @endpoint
    async def export_peft(self, policy: str, path: Path) -> None:
        """`Engine.export_peft` in float32."""
        engine = self._policies[policy].engine
        with engine.memory.phase("export_peft"):
            engine.export_peft(path, torch.float32)
