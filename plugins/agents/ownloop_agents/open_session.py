"""A session while its program runs: its key, its limits, the calls so far, and the requests that are being answered."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ownloop_agents.sessions import EndedBy, ModelCall
from ownloop_agents.splicing import EarlierCall
from rl.checks import check_above_zero, check_at_least
from rl.types import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What one session may use. A request beyond it is refused with status 400, which no SDK repeats."""

    max_calls: int = 64
    """Requests that are answered."""
    max_sampled_tokens: int = 32_768
    """Tokens of all answers. Of parallel answers each may use what is left."""
    max_parallel: int = 16
    """Requests that are answered at the same time. Others wait."""
    max_body_bytes: int = 32 << 20
    """Size of one request."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_at_least(
            1, max_calls=self.max_calls, max_sampled_tokens=self.max_sampled_tokens, max_parallel=self.max_parallel
        )
        check_above_zero(max_body_bytes=self.max_body_bytes)


class SessionEndedError(Exception):
    """The session of a request is over."""


@dataclass(slots=True, eq=False)
class OpenSession:
    """A session whose program may still ask."""

    id: str
    key: str
    sampling: SamplingParams
    limits: SessionLimits
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    earlier: list[EarlierCall] = field(default_factory=list[EarlierCall])
    """The calls as later requests need them."""
    ended_by: EndedBy | None = None
    """The limit that was reached, if one was."""
    last_request: float = field(default_factory=time.monotonic)
    """When the program last asked, or got an answer."""
    num_asked: int = 0
    texts: Counter[int] = field(default_factory=Counter[int])
    """How many requests had a text, by its hash."""
    places: asyncio.Semaphore = field(init=False)
    running: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    """What requests wait for now."""
    answering: set[AsyncGenerator[Any]] = field(default_factory=set[AsyncGenerator[Any]])
    ended: bool = False

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.limits.max_parallel)  # here, because a default cannot see the limits

    async def while_open(self, awaitable: Awaitable[T]) -> T:
        """Waits for something. Raises `SessionEndedError` if the session ends meanwhile."""
        if self.ended:
            raise SessionEndedError
        waiting = asyncio.ensure_future(awaitable)
        self.running.add(waiting)
        try:
            found = await waiting
        except asyncio.CancelledError:
            if not self.ended:  # the program's client has gone, and not the session
                raise
        else:
            if not self.ended:  # vLLM answers a request that was cancelled
                return found  # the answer came before the end
        finally:
            self.running.discard(waiting)
        raise SessionEndedError

    async def end(self) -> None:
        """Cancels the requests that are being answered, also of a client that no longer reads."""
        self.ended = True
        waiting = [*self.running]  # a copy: each removes itself when it ends
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in [*self.answering]:
            with contextlib.suppress(RuntimeError):  # it is about to notice by itself
                await each.aclose()

    @property
    def num_sampled(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(call.turn.completion.tokens) for call in self.calls)
