"""The commands that callers put to an engine's thread, and the thread's answers."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any, cast

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.outputs import RequestOutput

from generator.engine_commands import Cancel, Command, Generate, Stream
from generator.engine_status import ActivityClock, EngineStoppedError, describe

_IDLE_S = 60.0  # an idle rank 0 broadcasts no commands this often, or the waiting ranks' group would time out
_BURST_S = 0.002  # requests that are sent together arrive at an engine closer to each other than this
_MAX_BURST_S = 0.02  # the first request waits no longer than this for others


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

    async def stream(self, command: Stream) -> AsyncGenerator[RequestOutput]:
        """Passes a command on and yields the outputs of its request. Closing the generator cancels the request."""
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | None]()

        def put(output: RequestOutput | None) -> None:
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

    def is_streamed(self, request_id: str) -> bool:
        """Whether a caller of this rank takes the outputs of a request as they come."""
        return request_id in self._streams

    def pass_on(self, output: RequestOutput) -> None:
        """Gives an output to the caller that takes those of its request, if there is one."""
        if (put := self._streams.get(output.request_id)) is not None:
            put(output)

    def put(self, command: Command) -> None:
        """Passes on a command that needs no answer."""
        self._commands.put(command)

    def receive(self, group: GroupCoordinator, clock: ActivityClock, *, wait: bool) -> list[Command]:
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

    def answer(self, command_id: str, result: Any = None, error: BaseException | None = None) -> None:
        """Answers a command. Does nothing on the ranks that were not asked, nor if the caller has given up."""
        answer = self._answers.pop(command_id, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)

    def finish(self, command_id: str, make: Callable[[], Any]) -> None:
        """Answers with what `make` returns, or the error that it raises. The end of a stream is its whole answer."""
        try:
            result = None if self.is_streamed(command_id) else make()
        except Exception as error:
            self.answer(command_id, error=error)
        else:
            self.answer(command_id, result)

    def forget(self, command_id: str) -> None:
        """Notes that nobody waits for an answer any more."""
        self._answers.pop(command_id, None)

    def end(self, failure: BaseException) -> None:
        """Notes that the thread has ended. All commands without an answer raise `EngineStoppedError`."""
        with self._lock:
            self._failure = failure
        for command_id in list(self._answers):
            self.answer(command_id, error=_stopped(failure))


def _stopped(failure: BaseException) -> EngineStoppedError:
    return EngineStoppedError(f"the generation engine has stopped: {describe(failure)}")
