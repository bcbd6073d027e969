"""Calls an environment off the event loop, with a time limit; every failure becomes one exception with one sentence.

A thread cannot be stopped. One that exceeds its limit is abandoned: it keeps its core busy if it computes, but does not
keep the process from exiting. Code that holds the interpreter's lock for long, such as a regular expression with
endless backtracking, stops everything whatever the limit; it belongs in a process of its own (`rl.envs.sandbox`).
"""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

DEFAULT_TIME_LIMIT_S = 60.0
"""Limit of one call of an environment that does not set its own, `call_time_limit_s`."""
MAX_THREADS = 32
"""Calls that run at the same time. Further calls wait, and waiting does not count towards their time limit."""

T = TypeVar("T")
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class EnvironmentFailedError(Exception):
    """The environment raised, took too long or returned something invalid; the message says which."""


def time_limit_of(env: object) -> float:
    """Seconds that one call of this environment may take: its own `call_time_limit_s`, or else the default."""
    limit: float = getattr(env, "call_time_limit_s", DEFAULT_TIME_LIMIT_S)
    return limit


async def call_environment(function: Callable[..., T | Awaitable[T]], *arguments: Any, time_limit_s: float) -> T:
    """Calls a function in a thread; if it returns an awaitable, awaits it on the event loop. Returns the result.

    Raises `EnvironmentFailedError` for every failure of the function.
    """
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)  # starts to run when the call has its turn
    try:
        async with limit:
            async with _semaphores.setdefault(loop, asyncio.Semaphore(MAX_THREADS)):
                limit.reschedule(loop.time() + time_limit_s)
                result = await _in_thread(function, arguments, loop)
            return await _contained(cast("Awaitable[T]", result)) if inspect.isawaitable(result) else cast("T", result)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():  # the function may raise a TimeoutError of its own
            raise EnvironmentFailedError(f"it did not answer within {time_limit_s:g} s") from None
        raise EnvironmentFailedError(f"{type(error).__name__}: {words_of(error)}") from error


def words_of(error: BaseException) -> str:
    """The message of an error that anybody's code raised; empty if making it raises in turn."""
    try:
        return str(error)
    except Exception:
        return ""


async def _contained(awaitable: Awaitable[T]) -> T:
    """Awaits it. Raises RuntimeError for errors that would end the event loop or cancel the caller.

    A KeyboardInterrupt is the user's, and passes.
    """
    try:
        return await awaitable
    except (Exception, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{type(error).__name__}: {words_of(error)}") from error


def _in_thread(
    function: Callable[..., Any], arguments: tuple[Any, ...], loop: asyncio.AbstractEventLoop
) -> "asyncio.Future[Any]":
    """A future of the function's result, computed in a new thread."""
    answer: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if answer.done():  # cancelled, by the time limit or together with its rollout
            return
        if error is None:
            answer.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            answer.set_exception(error)
        else:  # SystemExit in an environment must not end the run, and a future refuses StopIteration
            answer.set_exception(RuntimeError(f"{type(error).__name__}: {words_of(error)}"))

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has been closed in the meantime
            loop.call_soon_threadsafe(settle, result, failure)

    # A daemon thread of its own, because a thread pool would wait for abandoned calls when the process exits.
    threading.Thread(target=work, name="environment", daemon=True).start()
    return answer
