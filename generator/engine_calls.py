"""How callers talk to an engine's thread: their commands, the order of the commands, the answers, the thread's status.

    event loop, or any thread                            the engine's thread
    EngineCalls.answered(command) -> queue ------------> receive: rank 0 takes the commands and broadcasts them
                                                         Backlog.next: the next command that need not wait
    await, or the next output of a stream <------------- EngineCalls.answer, pass_on
    EngineStatus <-------------------------------------- ActivityClock

The controller imports this module, so it imports neither torch nor vLLM.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rl.lora import Policy
from rl.types import PullMode, SamplingParams

if TYPE_CHECKING:  # the imports would load torch and vLLM
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.outputs import RequestOutput

    from rl.weights.version import VersionRecord


_IDLE_S = 60.0  # an idle rank 0 broadcasts no commands this often, or the waiting ranks' group would time out
_BURST_S = 0.002  # requests that are sent together arrive at an engine closer to each other than this
_MAX_BURST_S = 0.02  # the first request waits no longer than this for others


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample completions of one prompt."""

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class Stream:
    """Sample one prompt as vLLM's own parameters say, and pass on every output as it comes."""

    id: str
    prompt_tokens: tuple[int, ...]
    params: "VLLMSamplingParams"
    """With a seed."""
    policy: Policy


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request."""

    id: str
    """The id of the request."""


@dataclass(frozen=True, slots=True)
class Update:
    """Load a version of the weights."""

    id: str
    record: "VersionRecord"
    frozen: bool
    mode: PullMode
    keep_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class Freeze:
    """Keep an adapter's newest version, if it is this one."""

    id: str
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Serve a policy no longer."""

    id: str
    policy: Policy


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the GPU's memory once no request is running."""

    id: str


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Take the GPU's memory again."""

    id: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the thread."""

    id: str


Queued = Generate | Stream | Update | Freeze | Drop | Sleep | WakeUp | Close
Command = Queued | Cancel


class Backlog:
    """Commands that have not been carried out. They run as they came, but no policy waits for another one's requests.

    A command waits for an earlier one that concerns the same policy and waits itself. Also, an update in "drain"
    mode waits for the running requests of its policy, and `Sleep` waits for all running requests. An update of
    the model itself concerns every policy.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._commands: list[Queued] = []

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._commands)

    def append(self, command: Queued) -> None:
        """Adds a command."""
        self._commands.append(command)

    def cancel(self, cancel: Cancel) -> bool:
        """Drops the command of this id. Returns whether it was there."""
        kept = [command for command in self._commands if command.id != cancel.id]
        found = len(kept) < len(self._commands)
        self._commands = kept
        return found

    def next(self, has_requests: Callable[[Policy], bool]) -> Queued | None:
        """Takes out the next command that need not wait; None if all have to.

        `has_requests` says whether requests of a policy are running; for None, whether any are.
        """
        waiting: set[Policy] = set()
        for index, command in enumerate(self._commands):
            concerned = _concerned(command)
            behind = bool(waiting if concerned is None else waiting & concerned)
            if not behind and not _waits(command, has_requests):
                return self._commands.pop(index)
            if concerned is None:
                return None
            waiting |= concerned
        return None


def _waits(command: Queued, has_requests: Callable[[Policy], bool]) -> bool:
    match command:
        case Update(mode="drain", frozen=False):
            return has_requests(command.record.policy)
        case Sleep():
            return has_requests(None)
        case _:
            return False


def _concerned(command: Queued) -> set[Policy] | None:
    """The policies that a command concerns; None if it concerns all of them."""
    match command:
        case Close() | Sleep() | WakeUp():
            return None
        case Generate() | Stream() | Drop():
            return {command.policy}
        case Freeze():
            return {command.name, (command.name, command.version)}
        case Update():
            policy = command.record.policy
            if policy is None:
                return None
            return {policy, (policy, command.record.version)} if command.frozen else {policy}


class EngineCalls:
    """Passes commands to the engine's thread. Any thread may call `submit` and `put`; that thread calls the rest."""

    def __init__(self, *, burst_s: float = _BURST_S, max_burst_s: float = _MAX_BURST_S) -> None:
        """Starts without commands.

        Requests that follow each other within `burst_s` share their first step, but the first waits at most
        `max_burst_s` for others.
        """
        self._burst_s = burst_s
        self._max_burst_s = max_burst_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._answers: dict[str, Future[Any]] = {}
        self._streams: dict[str, Callable[[RequestOutput | None], None]] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why the thread has ended; None while it runs."""
        return self._failure

    def submit(self, command: Command) -> Future[Any]:
        """Passes a command on and returns its answer. Raises `EngineStoppedError` once the thread has ended."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise _stopped(self._failure)
            self._answers[command.id] = answer
        self._commands.put(command)
        return answer

    async def answered(self, command: Command) -> Any:
        """Passes a command on and waits for its answer. Cancelling the call cancels the command."""
        answer = self.submit(command)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self.put(Cancel(command.id))
            raise

    async def stream(self, command: Stream) -> "AsyncGenerator[RequestOutput]":
        """Passes a command on and yields the outputs of its request. Closing the generator cancels the request."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()

        def put(output: "RequestOutput | None") -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and the caller is gone with it
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        self._streams[command.id] = put
        try:
            answer = self.submit(command)
            answer.add_done_callback(lambda _: put(None))
            while (output := await outputs.get()) is not None:
                yield output
            answer.result()
        finally:
            del self._streams[command.id]
            self.put(Cancel(command.id))  # without effect on a request that has ended

    def pass_on(self, output: "RequestOutput") -> None:
        """Gives an output to the caller that takes this request's outputs, if there is one."""
        if (put := self._streams.get(output.request_id)) is not None:
            put(output)

    def put(self, command: Command) -> None:
        """Passes on a command that needs no answer."""
        self._commands.put(command)

    def receive(self, group: "GroupCoordinator", clock: "ActivityClock", *, wait: bool) -> list[Command]:
        """Takes rank 0's commands out of its queue and returns them on every rank."""
        commands: list[Command] = []
        if group.rank_in_group == 0:
            with contextlib.suppress(queue.Empty):
                if wait:
                    with clock.idle():
                        commands.append(self._commands.get(timeout=_IDLE_S))
                        self._await_burst(commands)
                while True:
                    commands.append(self._commands.get_nowait())
            with clock.during("broadcast"):
                return cast(list[Command], group.broadcast_object(commands))
        with clock.idle():
            return cast(list[Command], group.broadcast_object())

    def _await_burst(self, commands: list[Command]) -> None:
        """Appends requests that come right after the first, which would otherwise wait until its first step is over."""
        end = time.monotonic() + self._max_burst_s
        with contextlib.suppress(queue.Empty):
            while isinstance(commands[-1], Generate | Stream) and time.monotonic() < end:
                commands.append(self._commands.get(timeout=self._burst_s))

    def answer(self, command_id: str, result: object = None, error: BaseException | None = None) -> None:
        """Answers a command. Does nothing on the ranks that were not asked, nor if the caller has given up."""
        answer = self._answers.pop(command_id, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def forget(self, command_id: str) -> None:
        """Notes that no caller waits for the answer any more."""
        self._answers.pop(command_id, None)

    def end(self, failure: BaseException) -> None:
        """Notes that the thread has ended. All commands without an answer raise `EngineStoppedError`."""
        with self._lock:
            self._failure = failure
        for command_id in list(self._answers):
            self.answer(command_id, error=_stopped(failure))


def _stopped(failure: BaseException) -> "EngineStoppedError":
    return EngineStoppedError(f"the generation engine has stopped: {describe(failure)}")


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended, in most cases by an exception in vLLM. Nothing can be sampled any more."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One look at an engine's thread."""

    activity: str | None
    """The name of its work; None if it waits for a command."""
    seconds: float
    """How long it has lasted."""
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
