"""Trainers and a generator on the same GPUs: `placement = "colocated"`. One side at a time has the memory.

    trainer's call ---> Mesh.call ---> phase("train") ---\
                                                          one phase at a time
    generate, pull ---> Mesh.call ---> phase("sample") --/

In the training phase the generator sleeps: vLLM drops keys and values and keeps its weights in the host's memory. In
the sampling phase the trainers' parameters, gradients and optimizer state are in the host's memory. A phase begins with
the first call of its side, waits for the running calls of the other side, and lasts until the other side has a call.

On the CPU the same calls are made, and nothing is moved.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from controller.processes.errors import MeshError

if TYPE_CHECKING:  # the import would load Monarch
    from controller.processes.mesh import Mesh

Side = Literal["train", "sample"]


class Member(Protocol):
    """Processes that use memory of the shared GPUs whenever their side has it."""

    @property
    def mesh(self) -> "Mesh":
        """The processes. Their calls wait until their side has the memory."""
        ...

    async def take_memory(self) -> None:
        """Takes the memory that calls need. Called while the side gets the GPUs, so it must not wait for them."""
        ...

    async def free_memory(self) -> None:
        """Frees that memory. The same holds."""
        ...


class SharedGPUs:
    """Which of two sides has the memory of the GPUs that they share. To be used from one event loop."""

    def __init__(self) -> None:
        """Neither side has it yet."""
        self._gate = asyncio.Lock()
        self._no_calls = asyncio.Event()
        self._no_calls.set()
        self._num_calls = 0
        self._side: Side | None = None
        self._switch_under_way: asyncio.Future[None] | None = None
        self._members: Mapping[Side, list[Member]] = {"train": [], "sample": []}
        self._starts: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def starting(self, gpus: Sequence[str] | None) -> AsyncGenerator[None]:
        """Within the block, no other mesh starts on these GPUs, colocated or not.

        vLLM measures at its start how much memory is free, and fails if the measure changes meanwhile.
        """
        async with AsyncExitStack() as stack:
            for gpu in sorted(gpus or ()):  # in one order, so that no two starts wait for each other
                await stack.enter_async_context(self._starts.setdefault(gpu, asyncio.Lock()))
            yield

    def join(self, side: Side, member: Member) -> None:
        """Adds a member, which holds its memory already. So its side must have the GPUs now."""
        self._members[side].append(member)
        member.mesh.gate = partial(self.phase, side)

    def leave(self, member: Member) -> None:
        """Forgets a member that is gone."""
        for members in self._members.values():
            if member in members:
                members.remove(member)

    @asynccontextmanager
    async def phase(self, side: Side) -> AsyncGenerator[None]:
        """Waits until this side has the GPUs' memory, and keeps it within the block.

        Calls of one side run together; the sides alternate in the order of their calls.
        """
        # A call that others of its side may be waiting for, such as a replica's restart, must not wait behind the gate.
        if not (self._side == side and self._num_calls):
            async with self._gate:
                # A call that was cancelled may have left one behind, which continues.
                if self._switch_under_way is not None and not self._switch_under_way.done():
                    await asyncio.wait([self._switch_under_way])
                if self._side != side:
                    await self._no_calls.wait()
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
            self._no_calls.clear()
        else:
            self._no_calls.set()

    async def _switch(self, side: Side) -> None:
        other: Side = "sample" if side == "train" else "train"
        self._side = None  # if a member fails, the next call of either side tries again
        await asyncio.gather(*(self._ask(member, member.free_memory) for member in tuple(self._members[other])))
        await asyncio.gather(*(self._ask(member, member.take_memory) for member in tuple(self._members[side])))
        self._side = side

    async def _ask(self, member: Member, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A member whose processes died has no memory; the next call to it raises the error."""
        try:
            await work()
        except MeshError:
            self.leave(member)
