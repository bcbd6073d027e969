"""What an engine's thread is doing, told to those who wait for it by another thread of the same process."""

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, in most cases by an exception in vLLM. Nothing can be sampled any more."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One look at an engine's thread."""

    activity: str | None
    """What it is doing; None if it waits for something to do."""
    seconds: float
    """For how long."""
    slowest_s: float | None
    """How long the same activity took at most so far; None if it is the first time."""
    num_steps: int
    """Steps taken so far."""
    num_unfinished: int
    """Samples that are running or waiting in vLLM."""
    failure: str | None
    """Why the thread has ended; None if it runs."""


_COMMAND = "command"
"""What the thread does between its other activities: it takes commands and answers them."""


class ActivityClock:
    """Kept by the thread that does something, and read by any other."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Starts idle."""
        self._now = now
        self._current: tuple[str, float] | None = None
        self._slowest_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @contextlib.contextmanager
    def during(self, activity: str) -> Generator[None]:
        """Marks what the thread does within the block. If the block raises, its time does not count."""
        self._done()
        self._current = (activity, self._now())
        try:
            yield
            self._done()
        finally:
            self._current = (_COMMAND, self._now())

    @contextlib.contextmanager
    def idle(self) -> Generator[None]:
        """Marks that the thread has nothing to do within the block."""
        self._done()
        self._current = None
        try:
            yield
        finally:
            self._current = (_COMMAND, self._now())

    def _done(self) -> None:
        if self._current is not None:
            activity, started = self._current
            self._slowest_s[activity] = max(self._slowest_s.get(activity, 0.0), self._now() - started)
            self._counts[activity] = self._counts.get(activity, 0) + 1

    def status(self, num_unfinished: int, failure: BaseException | None) -> EngineStatus:
        """What the thread does now."""
        activity, started = self._current or (None, self._now())
        return EngineStatus(
            activity=activity,
            seconds=self._now() - started,
            slowest_s=None if activity is None else self._slowest_s.get(activity),
            num_steps=self._counts.get("step", 0),
            num_unfinished=num_unfinished,
            failure=None if failure is None else describe(failure),
        )


def describe(error: BaseException) -> str:
    """An exception's type and text."""
    return f"{type(error).__name__}: {error}"
