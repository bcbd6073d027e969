"""Calls an environment off the event loop, with a time limit; every failure becomes one exception with one sentence.

A thread cannot be stopped. One that exceeds its limit is abandoned: it keeps its core busy if it computes, but does not
keep the process from exiting. While `MAX_ABANDONED` of them run, further calls fail at once. Code that holds the
interpreter's lock for long, such as a regular expression with endless backtracking, stops everything and knows no
limit; it belongs in a process of its own (`ownloop_sandbox`).
"""

import asyncio
import contextvars
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Annotated, TypeVar, cast
from weakref import WeakKeyDictionary

from pydantic import AfterValidator

from rl.checks import frames_below
from rl.configuration import AsItIs
from rl.protocols import Env, EnvOptions, given

DEFAULT_TIME_LIMIT_S = EnvOptions().call_time_limit_s
"""Limit of one call of an environment that does not set its own, `call_time_limit_s`."""
MAX_THREADS = 32
"""Calls that run at the same time. Further calls wait, and waiting does not count towards their time limit."""

MAX_ABANDONED = 32
"""Calls that exceeded their limits and have not returned yet. With so many, no further call is started."""

_METHODS = {"train_problems": "(seed, start, count)", "eval_problems": "(count)"}
T = TypeVar("T")
_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class EnvironmentFailedError(Exception):
    """The environment raised, took too long or returned something invalid; the message says which."""

    @property
    def frames(self) -> str:
        """Where the environment raised, a line for each frame of its code; empty if it did not raise."""
        return "" if self.__cause__ is None else frames_below(self.__cause__, __file__)


def time_limit_of(env: object) -> float:
    """Seconds that one call of this environment may take: its own `call_time_limit_s`, or else the default."""
    return given(EnvOptions, env).call_time_limit_s


def require_env(env: T) -> T:
    """The same. Raises ValueError, naming what is missing, unless `env` has what `rl.protocols.Env` asks for."""
    missing = missing_of(env)
    if missing:
        raise ValueError(f"env is a {type(env).__name__}, and {missing[0]}; see rl.protocols.Env")
    return env


Environment = Annotated[AsItIs[Env], AfterValidator(require_env)]
"""The type of a configuration's field that holds an environment."""


def missing_of(env: object) -> list[str]:
    """One sentence for each attribute of `rl.protocols.Env` that is missing or of the wrong type."""
    if isinstance(env, type):
        return [f"{env.__name__} is a class; an instance of it is needed"]
    found: list[str] = []
    name, stop = getattr(env, "name", None), getattr(env, "stop", None)
    if not isinstance(name, str) or not name:
        found.append(f"its name is {name!r}; a text for readers of the metrics is needed")
    if not isinstance(stop, tuple) or not all(isinstance(s, str) and s for s in stop):  # pyright: ignore[reportUnknownVariableType]
        found.append(f"its stop is {stop!r}; a tuple of non-empty strings is needed, () for none")
    limit = time_limit_of(env)
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance] - it is the user's
        found.append(f"its call_time_limit_s is {limit!r}; a finite number of seconds above 0 is needed")
    return found + [
        f"it has no method {method}{arguments}"
        for method, arguments in _METHODS.items()
        if not callable(getattr(env, method, None))
    ]


class _Limit:
    """The time limit of a running call."""

    def __init__(self, seconds: float, outer: "_Limit | None") -> None:
        """`outer` is the limit of the call that makes this one, if there is one."""
        self.outer, self.timeout = outer, asyncio.timeout(None)
        self._loop, self._left_s, self._num_waiting = asyncio.get_running_loop(), seconds, 0

    def begin(self) -> None:
        """Starts the clock."""
        self.timeout.reschedule(self._loop.time() + self._left_s)

    def tell(self, change: int) -> None:
        """Says, from any thread, that one more or one less (-1) waits within the call."""
        with suppress(RuntimeError):  # the loop has been closed in the meantime
            self._loop.call_soon_threadsafe(self._tell, change)

    def _tell(self, change: int) -> None:
        self._num_waiting += change
        due = self.timeout.when()
        with suppress(RuntimeError):  # the call has ended
            if due is not None and self._num_waiting > 0:
                self._left_s = due - self._loop.time()
                self.timeout.reschedule(None)
            elif due is None and self._num_waiting == 0:
                self.begin()


_limits: contextvars.ContextVar[_Limit | None] = contextvars.ContextVar("limit", default=None)


@contextmanager
def waiting() -> Generator[None]:
    """Time within does not count towards the limits of the calls of an environment that are running here.

    It is for turns in a queue, not for work. Threads and coroutines of the environment may use it.
    """
    limits, limit = list[_Limit](), _limits.get()
    while limit is not None:
        limits.append(limit)
        limit = limit.outer
    for each in limits:
        each.tell(1)
    try:
        yield
    finally:
        for each in limits:
            each.tell(-1)


async def call_environment(function: Callable[..., T | Awaitable[T]], *arguments: object, time_limit_s: float) -> T:
    """Calls a function in a thread; if it returns an awaitable, awaits it on the event loop. Returns the result.

    Raises `EnvironmentFailedError` for every failure of the function.
    """
    if (running := _num_abandoned()) >= MAX_ABANDONED:
        raise EnvironmentFailedError(f"{running} earlier calls have never returned: no further one is started")
    turns = _semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS))
    limit = _Limit(time_limit_s, _limits.get())
    try:
        async with limit.timeout:
            with waiting():
                await turns.acquire()
            reset = _limits.set(limit)
            try:
                return await _called(function, arguments, limit, turns)
            finally:
                _limits.reset(reset)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.timeout.expired():  # the function may raise one of its own
            running = _num_abandoned()
            still = f": its thread still runs, one of {running}; at most {MAX_ABANDONED} may" if running else ""
            raise EnvironmentFailedError(f"it did not answer within {time_limit_s:g} s{still}") from None
        raise EnvironmentFailedError(f"{type(error).__name__}: {words_of(error)}") from error


async def _called(
    function: Callable[..., T | Awaitable[T]], arguments: tuple[object, ...], limit: _Limit, turns: asyncio.Semaphore
) -> T:
    """The result of a call that has its turn, which it gives back when the thread has ended."""
    try:
        limit.begin()
        result = await _in_thread(function, arguments, asyncio.get_running_loop())
    finally:
        turns.release()
    return await _contained(cast("Awaitable[T]", result)) if inspect.isawaitable(result) else cast("T", result)


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
        raise _ordinary(error) from None


def _ordinary(error: BaseException) -> RuntimeError:
    """An error in place of one that would end more than the call, where that was raised."""
    return RuntimeError(f"{type(error).__name__}: {words_of(error)}").with_traceback(error.__traceback__)


def _in_thread(
    function: Callable[..., object], arguments: tuple[object, ...], loop: asyncio.AbstractEventLoop
) -> "asyncio.Future[object]":
    """A future of the function's result, computed in a new thread."""
    answer: asyncio.Future[object] = loop.create_future()
    context = contextvars.copy_context()  # in which `waiting` finds the limits

    def settle(result: object, error: BaseException | None) -> None:
        if answer.done():  # cancelled, by the time limit or together with its rollout
            return
        if error is None:
            answer.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            answer.set_exception(error)
        else:  # SystemExit in an environment must not end the run, and a future refuses StopIteration
            answer.set_exception(_ordinary(error))

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(function, *arguments)
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop has been closed in the meantime
            loop.call_soon_threadsafe(settle, result, failure)

    # A daemon thread of its own, because a thread pool would wait for abandoned calls when the process exits.
    thread = threading.Thread(target=work, name="environment", daemon=True)
    answer.add_done_callback(lambda done: _abandoned.add(thread) if done.cancelled() else None)
    thread.start()
    return answer


_abandoned: set[threading.Thread] = set()


def _num_abandoned() -> int:
    """How many calls run that nobody waits for any more."""
    _abandoned.difference_update([thread for thread in _abandoned.copy() if not thread.is_alive()])
    return len(_abandoned)
