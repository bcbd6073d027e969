"""Calls whose answers come through one port. The actor runs in the test's own loop; the bytes between are real."""

import asyncio
import gc
import pickle
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import Actor

from controller.processes.errors import ArgumentsError, ProcessDiedError
from controller.processes.rank import Rank, answering
from tests.e2e.toy_actor import Toy
from tests.waiting import run_virtual


class Port:
    """Both ends of a channel. What goes through it is pickled."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, message: Any) -> None:
        """As Monarch's."""
        self._messages.put_nowait(pickle.dumps(message))

    async def recv(self) -> Any:
        """As Monarch's."""
        return pickle.loads(await self._messages.get())


class Handle:
    """Stands for Monarch's handle of an actor: messages reach it one after the other."""

    def __init__(self, actor: type[Actor], *args: Any) -> None:
        self._class = answering(actor)
        self._args = args
        self._messages: asyncio.Queue[tuple[str, tuple[Any, ...], asyncio.Future[Any]]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._run())
        self.death: asyncio.Future[None] = self._loop.create_future()

    def __getattr__(self, name: str) -> Any:
        assert getattr(self._class, name)  # AttributeError for what the actor lacks
        send = partial(self._send, name)
        return SimpleNamespace(call_one=send, broadcast=lambda *args: send(*args).cancel())

    def _send(self, verb: str, *args: Any) -> asyncio.Future[Any]:
        if verb == "live":
            return self.death
        answer = self._loop.create_future()
        self._messages.put_nowait((verb, args, answer))
        return answer

    async def _run(self) -> None:
        instance: Any = None
        while True:
            verb, args, answer = await self._messages.get()
            try:
                instance = self._class(*self._args) if instance is None else instance
                result = await getattr(self._class, verb)._method(instance, *args)
                if not answer.cancelled():
                    answer.set_result(result)
            except Exception as error:
                if answer.cancelled():  # nobody awaits it: Monarch ends such an actor
                    self.death.set_exception(error)
                    self.death.exception()  # asyncio need not tell that nobody has asked for it
                    return
                answer.set_exception(error)


@pytest.fixture(autouse=True)
def _ports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Channel:
        def __class_getitem__(cls, _: object) -> type["Channel"]:
            return cls

        @staticmethod
        def open() -> tuple[Port, Port]:
            port = Port()
            return port, port

    monkeypatch.setattr("controller.processes.rank.Channel", Channel)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TOY_GREETING", "hello")


def ask(rank: Rank, verb: str, *args: Any) -> "asyncio.Future[Any]":
    """The answer to a call."""
    return rank.send(verb, rank.packed(verb, args))


def _with_rank(test: Callable[[Rank, Handle], Awaitable[None]], *arguments: Any) -> None:
    """Runs `test` with a rank of `Toy(*arguments)`."""

    async def main() -> None:
        handle = Handle(Toy, *arguments)
        await test(Rank("toy", handle), handle)

    run_virtual(main())


def test_answers_find_their_calls() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        late, dozing, blocked = ask(rank, "doze", 0.1), ask(rank, "doze", 0.05), ask(rank, "hang", 0.01)
        late.cancel()
        assert await ask(rank, "add", 2) == 7  # after `hang`, whose answer is None, and before those that doze
        assert (blocked.done(), dozing.done()) == (True, False)
        assert await dozing == 0.05
        ask(rank, "complain", 3).cancel()  # what it raises is nobody's
        await asyncio.sleep(0.1)  # the answer to the call that was given up comes
        assert await ask(rank, "add", 3) == 8
        assert not rank._waiting  # pyright: ignore[reportPrivateUsage]

    _with_rank(test, 5)


def test_arguments_pickled_in_a_thread_are_sent_when_asked() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        with ThreadPoolExecutor(1) as thread:
            packed = thread.submit(rank.packed, "echo", ("large",)).result()
        assert await ask(rank, "echo", "small") == "small"
        assert await rank.send("echo", packed) == "large"
        with pytest.raises(ArgumentsError, match=r"echo: an argument of the call cannot be sent"):
            rank.packed("echo", (threading.Lock(),))

    _with_rank(test, 5)


def test_asyncio_says_nothing_of_an_error_that_nobody_awaits() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        ask(rank, "complain", 3)  # neither awaited nor cancelled
        assert await ask(rank, "add", 2) == 7
        gc.collect()  # asyncio speaks when a future goes
        assert said == []

    _with_rank(test, 5)


def test_mistakes_arrive_and_the_actor_goes_on() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        mistakes = {
            ask(rank, "complain", 3): (ValueError, "value is 3; it must be even"),
            ask(rank, "complain"): (TypeError, "missing 1 required"),
            ask(rank, "complain_in_two_parts"): (RuntimeError, "TwoPartError: this and that"),
            ask(rank, "lock"): (TypeError, "cannot pickle"),
            ask(rank, "wave"): (AttributeError, "wave"),
            ask(rank, "exit", 3): (RuntimeError, "SystemExit: 3"),  # as a loss of the user's may raise it
        }
        for call, (kind, text) in mistakes.items():
            with pytest.raises(kind, match=text) as caught:
                await call
            assert "rank.py" in "".join(caught.value.__notes__)
        assert await ask(rank, "add", 1) == 6

    _with_rank(test, 5)


class Fading:
    """Can be unpickled so many times; later ones are as where its module does not exist."""

    times = 0
    error: BaseException = ModuleNotFoundError("No module named 'my_losses'")

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _unpickled, ()


class FadingError(Fading, Exception):
    """The same as an exception."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _unpickled_error, ()


def _unpickled() -> Fading:
    Fading.times -= 1
    if Fading.times < 0:
        raise Fading.error
    return Fading()


def _unpickled_error() -> FadingError:
    _unpickled()
    return FadingError("an error of the user's")


@pytest.mark.stranger("B3")
def test_an_argument_that_cannot_be_read_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        assert await ask(rank, "add", 1) == 6
        Fading.times = 0
        with pytest.raises(ArgumentsError, match=r"echo: .*No module named 'my_losses'; .*the script's folder"):
            await ask(rank, "echo", Fading())
        with pytest.raises(ArgumentsError, match="doze: a process cannot read an argument"):  # calls that run at once
            await ask(rank, "doze", Fading())
        ask(rank, "echo", Fading()).cancel()  # nobody awaits it, and the actor lives
        monkeypatch.setattr(Fading, "error", SystemExit(3))  # of a module that ends its process
        with pytest.raises(ArgumentsError, match="cannot read an argument of the call: SystemExit: 3"):
            await ask(rank, "echo", Fading())
        with pytest.raises(ArgumentsError, match=r"echo: an argument .* cannot be sent .*lock"):
            ask(rank, "echo", threading.Lock())
        assert await ask(rank, "add", 2) == 7

    _with_rank(test, 5)


@pytest.mark.stranger("B3")
def test_an_answer_that_cannot_be_read_fails_its_call_alone() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        Fading.times = 1  # as an argument
        with pytest.raises(RuntimeError, match=r"^an answer cannot be read here: ModuleNotFoundError: No module"):
            await ask(rank, "echo", Fading())
        Fading.times = 2  # and when the rank sees whether it survives
        with pytest.raises(RuntimeError, match=r"^FadingError: an error of the user's") as caught:
            await ask(rank, "echo", FadingError())
        assert "toy_actor.py" in "".join(caught.value.__notes__)
        assert await ask(rank, "add", 2) == 7

    _with_rank(test, 5)


def test_a_death_ends_the_calls_under_way_and_all_later_ones() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        assert await ask(rank, "add", 1) == 6
        dozing = ask(rank, "doze", 10)
        handle.death.set_exception(RuntimeError("process exited"))
        with pytest.raises(RuntimeError, match="process exited"):
            await dozing
        with pytest.raises(RuntimeError, match="process exited"):
            await ask(rank, "add", 1)

    _with_rank(test, 5)


def test_an_actor_that_cannot_be_made_says_why() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        for _ in range(2):
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'base'"):
                await ask(rank, "add", 1)

    _with_rank(test)


def test_another_running_event_loop_is_refused() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        assert await ask(rank, "add", 1) == 6
        dozing = ask(rank, "doze", 1)

        async def reply() -> int:  # of an environment's method that runs in a thread
            return await ask(rank, "add", 2)

        with pytest.raises(RuntimeError, match=r"add is called in another event loop .*run_coroutine_threadsafe"):
            await asyncio.to_thread(asyncio.run, reply())
        assert await dozing == 1
        assert await ask(rank, "add", 3) == 8

    _with_rank(test, 5)


def test_a_mesh_that_is_stopped_ends_its_calls() -> None:
    async def test(rank: Rank, handle: Handle) -> None:
        dozing = ask(rank, "doze", 10)
        await asyncio.sleep(0)
        rank.close()
        with pytest.raises(ProcessDiedError, match="its mesh was stopped"):
            await dozing

    _with_rank(test, 5)
