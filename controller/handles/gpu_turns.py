"""Trainers and a generator that take turns on the same GPUs: `placement = "colocated"`.

In a trainer's turn the generator sleeps: vLLM drops keys and values and keeps its weights in the host's memory. In the
generator's turn the trainers' parameters, gradients and optimizer state are there. A turn begins with the first call
of its side, waits for the running calls of the other side, and lasts until the other side has a call.

On the CPU the same calls are made, and nothing is moved.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from controller.processes.errors import MeshError
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.protocols import Generator, Trainer
from rl.types import (
    AdamParams,
    Completion,
    Datum,
    ForwardBackwardOutput,
    OptimStepOutput,
    Placement,
    PullMode,
    SamplingParams,
)

if TYPE_CHECKING:  # the imports would load torch and Monarch
    from controller.handles.generator_handle import GeneratorHandle

Side = Literal["train", "sample"]


class Party(Protocol):
    """What gives up its memory while the other side has its turn."""

    async def begin_turn(self) -> None:
        """Takes the memory that its calls need."""
        ...

    async def end_turn(self) -> None:
        """Frees it."""
        ...


class Turns:
    """Whose turn it is on the GPUs that the two sides share. To be used from one event loop."""

    def __init__(self) -> None:
        """It is nobody's turn yet."""
        self._gate = asyncio.Lock()
        self._ended = asyncio.Event()
        self._ended.set()
        self._num_calls = 0
        self._side: Side | None = None
        self._switch_under_way: asyncio.Future[None] | None = None
        self._parties: Mapping[Side, list[Party]] = {"train": [], "sample": []}

    def join(self, side: Side, party: Party) -> None:
        """Adds a party, which holds its memory now: it is its side's turn."""
        self._parties[side].append(party)

    def leave(self, party: Party) -> None:
        """Forgets a party that is gone."""
        for parties in self._parties.values():
            if party in parties:
                parties.remove(party)

    @asynccontextmanager
    async def turn(self, side: Side) -> AsyncGenerator[None]:
        """Within the block it is this side's turn. Calls of a side run together; sides come in the order of calls."""
        # A call that others of its side may be waiting for, such as a replica's restart, must not wait behind the gate.
        if not (self._side == side and self._num_calls):
            async with self._gate:
                # A call that was cancelled may have left one behind, which goes on.
                if self._switch_under_way is not None and not self._switch_under_way.done():
                    await asyncio.wait([self._switch_under_way])
                if self._side != side:
                    await self._ended.wait()
                    self._switch_under_way = asyncio.ensure_future(self._switch(side))
                    await asyncio.shield(self._switch_under_way)
                self._count(1)
        else:
            self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_calls += change
        if self._num_calls:
            self._ended.clear()
        else:
            self._ended.set()

    async def _switch(self, side: Side) -> None:
        other: Side = "sample" if side == "train" else "train"
        self._side = None  # if a party fails, the next call of either side tries again
        await asyncio.gather(*(self._told(party, party.end_turn) for party in tuple(self._parties[other])))
        await asyncio.gather(*(self._told(party, party.begin_turn) for party in tuple(self._parties[side])))
        self._side = side

    async def _told(self, party: Party, tell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A party whose processes died has no memory; the next call to it raises the error."""
        try:
            await tell()
        except MeshError:
            self.leave(party)

    async def start_trainer(self, placement: Placement, start: Callable[[], Awaitable[Trainer]]) -> Trainer:
        """Awaits the start of a trainer. A colocated one starts in a turn, and takes turns."""
        if placement == "split":
            return await start()
        async with self.turn("train"):
            return TurnTakingTrainer(await start(), self)

    async def start_replica(
        self, placement: Placement, start: "Callable[[], Awaitable[GeneratorHandle]]"
    ) -> "GeneratorHandle":
        """Awaits the start of a generator's replica. A colocated one starts in a turn, and sleeps in the trainers'."""
        if placement == "split":
            return await start()
        async with self.turn("sample"):
            replica = await start()
            self.join("sample", _SleepingReplica(replica))
            return replica

    def generator(self, placement: Placement, generator: Generator) -> Generator:
        """A generator that takes turns if it is colocated; itself if not."""
        return generator if placement == "split" else TurnTakingGenerator(generator, self)


class _SleepingReplica:
    """A `Party`."""

    def __init__(self, replica: "GeneratorHandle") -> None:
        self._replica = replica

    async def begin_turn(self) -> None:
        await self._replica.rest(asleep=False)

    async def end_turn(self) -> None:
        await self._replica.rest(asleep=True)


class TurnTakingTrainer:
    """Implements `rl.protocols.Trainer`, and is a `Party`: every call is made in the trainers' turn."""

    def __init__(self, trainer: Trainer, turns: Turns) -> None:
        """`trainer` holds its memory now."""
        self._trainer = trainer
        self._turns = turns
        turns.join("train", self)

    async def begin_turn(self) -> None:
        """Takes back parameters and gradients. The optimizer state stays on the host, and is fetched in pieces."""
        await self._trainer.to("cuda", model=True, gradients=True)

    async def end_turn(self) -> None:
        """Moves everything to the host."""
        await self._trainer.to("cpu", model=True, gradients=True, optimizer=True)

    async def policy_version(self) -> int:
        """Needs no memory, so it waits for no turn. See `rl.protocols.Trainer` for this and all other calls."""
        return await self._trainer.policy_version()

    async def forward_backward(
        self, batch: Sequence[Datum], loss: str | Callable[..., Any], loss_config: Mapping[str, Any] | None = None
    ) -> ForwardBackwardOutput:
        """Adds the gradient of the loss."""
        async with self._turns.turn("train"):
            return await self._trainer.forward_backward(batch, loss, loss_config)

    async def forward(self, batch: Sequence[Datum], *, entropy: bool = False) -> ForwardBackwardOutput:
        """Computes log-probs."""
        async with self._turns.turn("train"):
            return await self._trainer.forward(batch, entropy=entropy)

    async def optim_step(self, params: AdamParams, grad_scale: float = 1.0) -> OptimStepOutput:
        """Applies a step."""
        async with self._turns.turn("train"):
            return await self._trainer.optim_step(params, grad_scale)

    async def zero_grad(self) -> None:
        """Drops the gradient."""
        async with self._turns.turn("train"):
            await self._trainer.zero_grad()

    async def to(self, device: str, *, model: bool = False, gradients: bool = False, optimizer: bool = False) -> None:
        """Offloads for the rest of this turn; a turn brings parameters and gradients back."""
        async with self._turns.turn("train"):
            await self._trainer.to(device, model=model, gradients=gradients, optimizer=optimizer)

    async def push_model_state_dict(self) -> int:
        """Publishes the weights."""
        async with self._turns.turn("train"):
            return await self._trainer.push_model_state_dict()

    async def save_checkpoint(self, path: Path, *, asynchronous: bool = False, keep_last: int | None = None) -> None:
        """Writes a checkpoint."""
        async with self._turns.turn("train"):
            await self._trainer.save_checkpoint(path, asynchronous=asynchronous, keep_last=keep_last)

    async def wait_for_checkpoint(self) -> None:
        """Needs no memory, so it waits for no turn."""
        await self._trainer.wait_for_checkpoint()

    async def load_checkpoint(self, path: Path, *, weights_only: bool = False) -> int:
        """Restores a checkpoint."""
        async with self._turns.turn("train"):
            return await self._trainer.load_checkpoint(path, weights_only=weights_only)

    async def export_hf(self, path: Path) -> None:
        """Writes a model directory."""
        async with self._turns.turn("train"):
            await self._trainer.export_hf(path)

    async def adapter(self, name: str, config: LoRAConfig) -> Trainer:
        """Makes an adapter, which takes turns too."""
        async with self._turns.turn("train"):
            return TurnTakingTrainer(await self._trainer.adapter(name, config), self._turns)

    async def drop(self) -> None:
        """Frees an adapter."""
        async with self._turns.turn("train"):
            await self._trainer.drop()
            self._turns.leave(self)

    async def export_peft(self, path: Path) -> None:
        """Writes an adapter."""
        async with self._turns.turn("train"):
            await self._trainer.export_peft(path)


class TurnTakingGenerator:
    """Implements `rl.protocols.Generator`: every call is made in the generator's turn."""

    def __init__(self, generator: Generator, turns: Turns) -> None:
        """Its replicas are parties of `turns`."""
        self._generator = generator
        self._turns = turns

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        """Samples. See `rl.protocols.Generator` for this and all other calls."""
        async with self._turns.turn("sample"):
            return await self._generator.generate(prompt_tokens, sampling, num_samples, policy=policy)

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        """Loads a version."""
        async with self._turns.turn("sample"):
            await self._generator.pull_model_state_dict(
                version, policy=policy, frozen=frozen, mode=mode, keep_prefix_cache=keep_prefix_cache
            )

    async def drop_policy(self, policy: Policy) -> None:
        """Forgets an adapter."""
        async with self._turns.turn("sample"):
            await self._generator.drop_policy(policy)
