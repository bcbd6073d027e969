"""A session while its program runs: its key, its limits, the calls so far, and the requests that are being answered."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import PositiveInt

from ownloop_agents.sessions import EndedBy, ModelCall
from ownloop_agents.splicing import EarlierCall
from rl.configuration import configuration
from rl.types import SamplingParams

T = TypeVar("T")


@configuration
class SessionLimits:
    """What one session may use. A request beyond it is refused with status 400, which no SDK repeats."""

    max_calls: PositiveInt = 64
    """Requests that are answered."""
    max_sampled_tokens: PositiveInt = 32_768
    """Tokens of all answers. Of parallel answers each may use what is left."""
    max_parallel: PositiveInt = 16
    """Requests that are answered at the same time. Others wait."""
    max_body_bytes: PositiveInt = 32 << 20
    """Size of one request."""


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
    unanswered: dict[int, str] = field(default_factory=dict[int, str])
    """Requests that the platform could not answer, by the hash of their text, and why. The same request takes its entry
    out once it is answered."""
    places: asyncio.Semaphore = field(init=False)
    running: set[asyncio.Future[Any]] = field(default_factory=set[asyncio.Future[Any]])
    """What requests wait for now."""
    answering: set[AsyncGenerator[object]] = field(default_factory=set[AsyncGenerator[object]])
    ended: bool = False

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.limits.max_parallel)  # here, because a default cannot see the limits

    def final_calls(self) -> tuple[ModelCall, ...]:
        """The calls of a program that has ended. Raises RuntimeError if the platform left it without an answer."""
        if self.unanswered:
            why = next(iter(self.unanswered.values()))
            raise RuntimeError(f"{len(self.unanswered)} requests of the program were not answered: {why:.300}")
        return tuple(self.calls)

    @contextmanager
    def asking(self, text: int) -> Generator[None]:
        """A request to the generator. Errors that are not the program's are failures of the platform."""
        try:
            yield
        except (ValueError, SessionEndedError):
            raise
        except Exception as error:
            self.answered(text, f"{type(error).__name__}: {error}")
            raise

    def answered(self, text: int, failure: str = "") -> None:
        """Notes that a request has its answer, or why it has none: it then counts for nothing."""
        if not failure:
            self.unanswered.pop(text, None)
            return
        self.unanswered[text] = failure
        self.num_asked -= 1
        self.texts[text] -= 1  # so that it has the same seed when it is made again

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
