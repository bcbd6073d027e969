"""Both ends of the calls to one rank's actor, whose answers come through a port that stays open.

For each of its own calls, Monarch 0.7.0 opens a port for the answer and never frees about 1.1 KB in the caller,
which is 9 MB a minute in a run of short steps. A call here is a message that has no port of its own. Its answer comes
through a port that the actor was given once, as an argument. Remove when Monarch's own calls keep nothing;
`tests/e2e/test_mesh.py` measures what a call keeps.

    controller                         a rank's process
    arguments -> bytes --- message --> bytes -> arguments -> endpoint
    result  <- bytes <----- port ----- bytes <- result, or what was raised

Both sides pickle by themselves, because Monarch ends an actor whose message it cannot unpickle. Here that is an error
of the call: a loss of the user's whose module a process cannot import costs nothing but that call.
"""

import asyncio
import itertools
import pickle
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from traceback import format_exception
from typing import Any, ClassVar

import cloudpickle  # as Monarch: it takes functions and classes of a script or a notebook
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, Channel, Port, PortReceiver, endpoint

from controller.processes.errors import ArgumentsError, ProcessDiedError

_LARGE_BYTES = 1 << 20
_NOT_STARTED = "error creating proc"
_Message = tuple[int, bytes, tuple[str, str] | None]
"""The id of a call, its pickled answer, and what was raised, in words, without and with its traceback."""


class Answering(Actor):
    """What every actor of a mesh has besides its own endpoints."""

    _port: Port[_Message]
    _running: ClassVar[set[asyncio.Task[None]]] = set()  # asyncio itself keeps no task alive

    @endpoint
    async def open_port(self, port: Port[_Message]) -> None:
        """Answers go through `port` from now on."""
        self._port = port

    @endpoint(explicit_response_port=True)
    async def live(self, port: Port[None]) -> None:
        """Never answers. Monarch ends the call with an error when the actor dies."""

    @endpoint
    async def answer_through_port(self, call_id: int, verb: str, arguments: bytes) -> None:
        """Runs the endpoint `verb` and sends `(call_id, answer, error)` through the open port.

        `arguments` are the pickled arguments, `answer` is the pickled result or exception, and `error` is the exception
        in words, or None. As in Monarch's own calls, later ones wait for an `@endpoint` and do not wait for a
        `@concurrent_endpoint`.
        """
        declared: Any = getattr(type(self), verb, None)
        if declared is None or not declared._explicit_response_port:
            await _answer(self._port, call_id, partial(_call, self, verb, arguments))
            return
        task = asyncio.create_task(_answer(self._port, call_id, partial(_call, self, verb, arguments)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def answering(actor: type[Actor]) -> type[Actor]:
    """`actor` with the endpoints of `Answering`."""
    return type(actor.__name__, (Answering, actor), {"__doc__": actor.__doc__, "__module__": __name__})


async def _call(actor: Actor, verb: str, arguments: bytes) -> object:
    declared: Any = getattr(type(actor), verb)
    # Monarch wraps a concurrent endpoint in a function that takes its response port.
    method = declared._method.__wrapped__ if declared._explicit_response_port else declared._method
    try:
        args = pickle.loads(arguments)
    except (Exception, SystemExit) as error:  # unpickling imports modules, which may do anything
        raise ArgumentsError(
            f"{verb}: a process cannot read an argument of the call: {type(error).__name__}: {error}; what an argument "
            "needs must be in a module that the process finds, in the script's folder, the working directory or one of "
            "PYTHONPATH"
        ) from error
    return await method(actor, *args)


async def _answer(port: Port[_Message], call_id: int, call: Callable[[], Awaitable[object]]) -> None:
    try:
        port.send((call_id, cloudpickle.dumps(await call()), None))
    except BaseException as error:
        port.send((call_id, _portable(error), _text(error)))
        if not isinstance(error, Exception | SystemExit):
            raise


def _portable(error: BaseException) -> bytes:
    """The error with its traceback as text, pickled; another one in its place if it does not survive that.

    A SystemExit of the user's code, such as a loss, would also end the script that gets it.
    """
    if isinstance(error, SystemExit):
        return cloudpickle.dumps(_in_words(*_text(error)))
    try:
        packed = cloudpickle.dumps(ActorError(error))
        pickle.loads(packed)
    except Exception:
        packed = cloudpickle.dumps(_in_words(*_text(error)))
    return packed


def _text(error: BaseException) -> tuple[str, str]:
    """The error in a line, and with its traceback."""
    return f"{type(error).__name__}: {error}", "".join(format_exception(error))


def _in_words(message: str, formatted: str) -> ActorError:
    """An error in place of one whose class this process or another one lacks."""
    wrapped = ActorError(RuntimeError(message))
    wrapped.exception_formatted = formatted
    return wrapped


class Rank:
    """The controller's end: the actor of one rank.

    Two tasks run from the first call on: one reads answers, the other learns from Monarch that the actor died. Both end
    with the event loop or at `close`.
    """

    def __init__(self, mesh: str, actor: Any) -> None:
        """`mesh` is the name of its mesh, and `actor` is Monarch's handle of an `Answering` actor in one process."""
        self._mesh = mesh
        self._actor = actor
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._call_ids = itertools.count()
        self._end: BaseException | None = None

    @staticmethod
    def packed(verb: str, args: Sequence[object]) -> bytes:
        """The arguments of a call, pickled, in any thread. Raises `ArgumentsError` for what cannot be pickled."""
        try:
            return cloudpickle.dumps(args)
        except Exception as error:
            raise ArgumentsError(f"{verb}: an argument of the call cannot be sent to a process: {error}") from error

    def send(self, verb: str, arguments: bytes) -> "asyncio.Future[Any]":
        """Sends a call of the endpoint `verb` with packed arguments at once. The future holds its result.

        The future raises the exception that the endpoint raised, and `ProcessDiedError` if the process dies. Cancelling
        it does not reach the endpoint.
        """
        loop = asyncio.get_running_loop()
        opened = self._tasks[0].get_loop() if self._tasks else None
        if opened is not None and opened is not loop and opened.is_running():
            raise RuntimeError(
                f"{verb} is called in another event loop than earlier calls, which still runs; from a thread, use "
                "asyncio.run_coroutine_threadsafe, and make an environment's method that awaits it `async def`"
            )
        if opened is not loop:
            self._open(loop)
        call_id, answer = next(self._call_ids), loop.create_future()
        if self._end is not None:
            _fail(answer, self._end)
            return answer
        self._actor.answer_through_port.broadcast(call_id, verb, arguments)
        self._waiting[call_id] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(call_id, None))
        return answer

    def close(self) -> None:
        """Ends the calls that are under way. The process should have ended."""
        for task in self._tasks:
            task.cancel()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        port, receiver = Channel[_Message].open()
        self._end = None
        opened = self._actor.open_port.call_one(port)
        self._tasks = [loop.create_task(self._read(receiver)), loop.create_task(self._watch(opened))]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def _read(self, receiver: PortReceiver[_Message]) -> None:
        while True:
            call_id, packed, error = await receiver.recv()
            answer = self._waiting.get(call_id)
            if answer is None:  # its caller was cancelled
                continue
            try:
                content = await unpickled(packed)
            except (Exception, SystemExit) as unreadable:  # its class is known to the rank's process alone
                fault, formatted = _text(unreadable)
                error = error or (f"an answer cannot be read here: {fault}", formatted)
                content = _in_words(*error)
            if answer.done():  # its caller was cancelled while a thread read it
                continue
            if error is None:
                answer.set_result(content)
            else:
                _fail(answer, explained(content, self._mesh))

    async def _watch(self, opened: Awaitable[None]) -> None:
        await opened
        await self._actor.live.call_one()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fails all calls with the reason why the first of the tasks ended."""
        if self._end is None:
            error = ProcessDiedError("its mesh was stopped") if task.cancelled() else task.exception()
            assert error is not None, "the tasks end by an error or are cancelled"
            self._end = explained(error, self._mesh)
            for answer in list(self._waiting.values()):
                if not answer.done():
                    _fail(answer, self._end)


async def unpickled(packed: bytes) -> Any:
    """What an answer holds. A thread reads a large one, so that the event loop stays free."""
    return await asyncio.to_thread(pickle.loads, packed) if len(packed) > _LARGE_BYTES else pickle.loads(packed)


def _fail(answer: "asyncio.Future[Any]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # asyncio complains of errors that are never looked at, and this call may not be awaited


def explained(error: BaseException, mesh: str) -> BaseException:
    """What an error of Monarch's stands for: the exception that an actor raised, or `ProcessDiedError`."""
    if isinstance(error, ActorError):
        error.exception.add_note(f"raised in a process of {mesh!r}:\n{error.exception_formatted}")
        return error.exception
    if isinstance(error, SupervisionError) or (isinstance(error, ValueError) and str(error).startswith(_NOT_STARTED)):
        return ProcessDiedError(how_it_died(str(error)))
    return error


def how_it_died(report: str) -> str:
    """Monarch's report of a death in a few words. The whole report is in the controller's log."""
    if report.startswith(_NOT_STARTED):
        return report.partition("\n")[0][:200]
    if found := re.search(r"Killed\(sig=(\d+)", report):
        number = int(found[1])
        memory = ", as the kernel does where memory is short" if number == signal.SIGKILL else ""
        return f"killed by {signal.Signals(number).name}{memory}"
    if found := re.search(r"(?:Stopped|Exited)\D*(\d+)", report):
        return f"ended with status {found[1]}"
    return report.strip().splitlines()[-1].strip()[:200]
