"""Calls into an environment: off the event loop, with a time limit, and with every failure told in one sentence.

A thread cannot be stopped. One that goes on past its limit is left behind; it keeps its core busy if it computes, and
does not keep the process from exiting. Code that holds the interpreter's lock for long (a regular expression that
backtracks without end) stops everything, whatever the limit: it belongs into a process of its own.
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

MAX_THREADS = 32
"""Calls that run at the same time; more wait their turn, which does not count for their limit."""

T = TypeVar("T")
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class EnvironmentFailedError(Exception):
    """The environment raised, took too long or returned what it must not; the message says which."""


async def call_environment(function: Callable[..., T | Awaitable[T]], *arguments: Any, time_limit_s: float) -> T:
    """What the function returns, awaited on the event loop if it is an awaitable. Raises `EnvironmentFailedError`."""
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)
    try:
        async with limit:
            async with _slots.setdefault(loop, asyncio.Semaphore(MAX_THREADS)):
                limit.reschedule(loop.time() + time_limit_s)
                result = await _in_thread(function, arguments, loop)
            return await cast("Awaitable[T]", result) if inspect.isawaitable(result) else cast("T", result)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            raise EnvironmentFailedError(f"it did not answer within {time_limit_s:g} s") from None
        raise EnvironmentFailedError(f"{type(error).__name__}: {error}") from error


def _in_thread(
    function: Callable[..., Any], arguments: tuple[Any, ...], loop: asyncio.AbstractEventLoop
) -> "asyncio.Future[Any]":
    """The result of the function, computed in a thread of its own."""
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():  # too late
            return
        if error is None:
            answer.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            answer.set_exception(error)
        else:  # SystemExit and its like are no way to end somebody else's process; a future takes no StopIteration
            answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return answer
