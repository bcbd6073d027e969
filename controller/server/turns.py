"""Runs a model's calls one after another in the order of their sequence numbers, whatever order they arrive in.

The client numbers its calls without gaps and sends them concurrently. A call is taken when all before it have ended,
so at most one call of a model is at the trainer: many clients take turns there, and one that floods only lengthens its
own queue.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

from controller.server.answers import Answer, PendingAnswer

Call = Callable[[], Awaitable[Answer]]
T = TypeVar("T")

GAP_S = 300.0
"""How long later calls wait for one that does not arrive. The client tries to send for five minutes."""


@contextlib.contextmanager
def errors_logged() -> Generator[None]:
    """Within the block, an exception is written to the log, and what comes after the block goes on."""
    try:
        yield
    except Exception:
        traceback.print_exc()


class Turns:
    """The calls of one model."""

    def __init__(self, name: str, gap_s: float = GAP_S) -> None:
        """The first call has the number 0. `name` appears in errors."""
        self._name = name
        self.gap_s = gap_s
        self._next = 0
        self._waiting: dict[int, tuple[Call, PendingAnswer]] = {}
        self._closed = False
        self._arrived = asyncio.Event()
        self._free = asyncio.Lock()
        self._runner = asyncio.create_task(self._run())

    @property
    def num_waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether a call is at the trainer."""
        return self._free.locked()

    def put(self, number: int, call: Call, pending: PendingAnswer) -> None:
        """Adds a call. Its result, or its error, goes to `pending`."""
        if number < self._next:
            done = f"sequence number {number} of {self._name} has been used; the next is {self._next}"
            pending.set(Answer.failure(ValueError(done)))
            return
        self._waiting[number] = (call, pending)
        self._arrived.set()

    async def between(self, call: Callable[[], Awaitable[T]]) -> T:
        """Runs a call that has no number when none of the others runs."""
        async with self._free:
            return await call()

    async def close(self) -> None:
        """Ends the calls that wait. Returns when the one that runs has ended: cut off, it could leave things behind."""
        self._closed = True
        self._arrived.set()
        await asyncio.wait([self._runner])  # which may have been cancelled with the whole server
        for _, pending in self._waiting.values():
            pending.set(Answer.failure(ValueError(f"{self._name} has ended")))
        self._waiting.clear()

    async def _run(self) -> None:
        while not self._closed:
            while self._next in self._waiting and not self._closed:
                call, pending = self._waiting.pop(self._next)
                self._next += 1
                async with self._free:
                    pending.set(await answer(call))
            if self._closed:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(self.gap_s if self._waiting else None):
                    await self._arrived.wait()
            except TimeoutError:
                self._skip_gap()

    def _skip_gap(self) -> None:
        """Fails the calls behind one that never came, so that the next call works again."""
        missing = self._next
        for number, (_, pending) in sorted(self._waiting.items()):
            lost = f"call {number} of {self._name} waited {self.gap_s:g} s for call {missing}, which never arrived"
            pending.set(Answer.failure(ValueError(f"{lost}; nothing was computed")))
        self._next = max(self._waiting) + 1
        self._waiting.clear()


async def answer(call: Call) -> Answer:
    """The call's result, or its error in the protocol's form. Faults of the server's are also printed."""
    try:
        return await call()
    except Exception as error:
        if not isinstance(error, ValueError):
            traceback.print_exc()
        return Answer.failure(error)
