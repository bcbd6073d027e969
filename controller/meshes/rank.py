"""`Rank`: the calls to one process's actor, whose answers come through a port that stays open.

For each of its own calls, Monarch 0.7.0 opens a port for the answer and keeps about 1.1 KB in the caller for ever,
which is 9 MB a minute in a run of short steps. A call here is a message that has no port of its own. Its answer comes
through a port that the actor was given once, as an argument. Remove when Monarch's own calls keep nothing;
`tests/e2e/test_mesh.py` measures what a call keeps.
"""

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import format_exception
from typing import Any, ClassVar

from monarch.actor import Actor, ActorError, Channel, Port, PortReceiver, endpoint

from controller.meshes.calls import ProcessDiedError


class Answering(Actor):
    """What every actor of a mesh has besides its own endpoints."""

    _port: Port[Any]
    _running: ClassVar[set[asyncio.Task[None]]] = set()  # asyncio itself keeps no task alive

    @endpoint
    async def open_port(self, port: Port[Any]) -> None:
        """Answers go through `port` from now on. Raises the error of a constructor that failed."""
        self._port = port

    @endpoint(explicit_response_port=True)
    async def live(self, port: Port[None]) -> None:
        """Never answers, so its caller is told by Monarch when the actor dies."""

    @endpoint
    async def answer_through_port(
        self, call_id: int, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Runs the endpoint `verb` and sends `(call_id, result, error)` through the open port.

        As in Monarch's own calls, later ones wait for an `@endpoint` and do not wait for a `@concurrent_endpoint`.
        """
        declared: Any = getattr(type(self), verb)
        if not declared._explicit_response_port:
            await _answer(self._port, call_id, partial(declared._method, self, *args, **kwargs))
            return
        # Monarch wraps a concurrent endpoint in a function that takes its response port.
        call = partial(declared._method.__wrapped__, self, *args, **kwargs)
        task = asyncio.create_task(_answer(self._port, call_id, call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)


def answering(actor: type[Actor]) -> type[Actor]:
    """`actor` with the endpoints of `Answering`."""
    return type(actor.__name__, (Answering, actor), {"__doc__": actor.__doc__, "__module__": __name__})


async def _answer(port: Port[Any], call_id: int, call: Callable[[], Awaitable[Any]]) -> None:
    try:
        port.send((call_id, await call(), None))
    except BaseException as error:
        port.send((call_id, None, _portable(error)))
        if not isinstance(error, Exception):
            raise


def _portable(error: BaseException) -> ActorError:
    """The error with its traceback as text; another one in its place if it does not survive pickling."""
    wrapped = ActorError(error)
    try:
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        wrapped = ActorError(RuntimeError(f"{type(error).__name__}: {error}"))
        wrapped.exception_formatted = "".join(format_exception(error))
    return wrapped


@dataclass(frozen=True, slots=True)
class Verb:
    """One endpoint of a rank."""

    rank: "Rank"
    name: str

    def call_one(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """Sends the call at once. The future holds its result.

        The future raises `ActorError`, which holds the exception that the endpoint raised, and Monarch's
        `SupervisionError` if the process dies. Cancelling it does not reach the endpoint.
        """
        return self.rank.call(self.name, args, kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Sends the call. Its result, or what it raises, is dropped."""
        self.rank.call(self.name, args, kwargs).cancel()


class Rank:
    """The actor of one rank: `await rank.step.call_one(3)` calls its endpoint `step`.

    Two tasks run from the first call on: one reads answers, the other learns from Monarch that the actor died. Both end
    with the event loop or at `close`.
    """

    def __init__(self, actor: Any) -> None:
        """`actor` is Monarch's handle of an `Answering` actor in one process."""
        self._actor = actor
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._end: BaseException | None = None

    def __getattr__(self, verb: str) -> Verb:
        if not hasattr(getattr(self._actor, verb), "call_one"):
            raise AttributeError(f"the actor has no endpoint {verb!r}")
        return Verb(self, verb)

    def call(self, verb: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "asyncio.Future[Any]":
        """See `Verb.call_one`."""
        loop = asyncio.get_running_loop()
        if not self._tasks or self._tasks[0].get_loop() is not loop:
            self._open(loop)
        call_id, answer = next(self._call_ids), loop.create_future()
        if self._end is not None:
            _fail(answer, self._end)
            return answer
        self._actor.answer_through_port.broadcast(call_id, verb, args, kwargs)
        self._waiting[call_id] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(call_id, None))
        return answer

    def close(self) -> None:
        """Ends the calls that are under way. The process should have ended."""
        for task in self._tasks:
            task.cancel()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        port, receiver = Channel[Any].open()
        self._end = None
        opened = self._actor.open_port.call_one(port)
        self._tasks = [loop.create_task(self._read(receiver)), loop.create_task(self._watch(opened))]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    async def _read(self, receiver: PortReceiver[Any]) -> None:
        while True:
            call_id, result, error = await receiver.recv()
            answer = self._waiting.get(call_id)
            if answer is None or answer.done():  # nobody waits for it any more
                continue
            if error is None:
                answer.set_result(result)
            else:
                _fail(answer, error)

    async def _watch(self, opened: Awaitable[None]) -> None:
        await opened
        await self._actor.live.call_one()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fails all calls with the reason why the first of the tasks ended."""
        if self._end is None:
            self._end = ProcessDiedError("its mesh was stopped") if task.cancelled() else task.exception()
            assert self._end is not None, "the tasks end by an error or are cancelled"
            for answer in list(self._waiting.values()):
                if not answer.done():
                    _fail(answer, self._end)


def _fail(answer: "asyncio.Future[Any]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # asyncio complains of errors that nobody has looked at, and nobody may await this call
