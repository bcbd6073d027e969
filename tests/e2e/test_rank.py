"""Calls whose answers come through one port: what an endpoint raises, and what cannot be read at the other end."""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from controller.processes.errors import ArgumentsError, MeshError
from controller.processes.mesh import Mesh
from controller.processes.rank import unpickled
from tests.e2e.toy_actor import Toy
from tests.waiting import until

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def toy(folder: Path, **env: str) -> AsyncGenerator[Mesh]:
    """A rank of `Toy(5)`."""
    mesh = await Mesh.spawn("toy", Toy, 5, num_ranks=1, env=env, log_dir=folder)
    try:
        yield mesh
    finally:
        await mesh.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def loop() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def mesh(folder: Path, loop: asyncio.Runner) -> Any:
    """One mesh for tests that leave it as it was."""
    running = toy(folder, TOY_GREETING="hello")
    yield loop.run(running.__aenter__())
    loop.run(running.__aexit__(None, None, None))


def ask(mesh: Mesh, verb: str, *args: Any) -> "asyncio.Task[Any]":
    """The answer of rank 0."""

    async def answer() -> Any:
        return (await mesh.call(verb, [args]))[0]

    return asyncio.create_task(answer())


@pytest.fixture
def run(mesh: Mesh, loop: asyncio.Runner) -> Callable[[Callable[[Mesh], Awaitable[None]]], None]:
    """Runs a test, after which the actor still answers."""

    def running(test: Callable[[Mesh], Awaitable[None]]) -> None:
        async def whole() -> None:
            await test(mesh)
            assert await ask(mesh, "add", 2) == 7

        loop.run(whole())

    return running


Run = Callable[[Callable[[Mesh], Awaitable[None]]], None]


def test_answers_find_their_calls(run: Run) -> None:
    async def test(mesh: Mesh) -> None:
        late, blocked, rank = ask(mesh, "doze", 0.5), ask(mesh, "hang", 0.01), cast(Any, mesh.rank(0))
        dozing = asyncio.create_task(mesh.call("doze", [(600.0,)], wait="at once"))
        await asyncio.sleep(0.1)
        late.cancel()
        assert await ask(mesh, "add", 2) == 7  # after `hang`, whose answer is None, and before the one that dozes
        assert (blocked.done(), dozing.done()) == (True, False)
        dozing.cancel()
        assert await ask(mesh, "doze", 0.4) == 0.4
        mesh.tell("complain", 3)  # what it raises is nobody's
        await until(lambda: not rank._waiting, "the answer to the call that was given up")

    run(test)


def test_a_call_may_be_cancelled_while_its_large_answer_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(mesh: Mesh) -> None:
        async def cancelled_meanwhile(packed: bytes) -> Any:
            if len(packed) > 1 << 20:
                large.cancel()
            return await unpickled(packed)

        monkeypatch.setattr("controller.processes.rank.unpickled", cancelled_meanwhile)
        large = asyncio.create_task(mesh.call("echo", [(bytes(2 << 20),)], wait="watched"))
        with pytest.raises(asyncio.CancelledError):
            await large

    run(test)


def test_asyncio_says_nothing_of_an_error_that_nobody_awaits(run: Run) -> None:
    async def test(mesh: Mesh) -> None:
        said: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
        rank = mesh.rank(0)
        rank.send("complain", rank.packed("complain", (3,)))  # neither awaited nor cancelled
        assert await ask(mesh, "add", 2) == 7
        gc.collect()  # asyncio speaks when a future goes
        assert said == []

    run(test)


def test_mistakes_arrive_and_the_actor_goes_on(run: Run) -> None:
    async def test(mesh: Mesh) -> None:
        for verb, args, kind, text in (
            ("complain", (3,), ValueError, "value is 3; it must be even"),
            ("complain", (), TypeError, "missing 1 required"),
            ("complain_in_two_parts", (), RuntimeError, "TwoPartError: this and that"),
            ("lock", (), TypeError, "cannot pickle"),
            ("wave", (), AttributeError, "wave"),
            ("exit", (3,), RuntimeError, "SystemExit: 3"),  # as a loss of the user's may raise it
        ):
            with pytest.raises(kind, match=text) as caught:
                await ask(mesh, verb, *args)
            assert "rank.py" in "".join(caught.value.__notes__)

    run(test)


@dataclass(frozen=True)
class Known:
    """Can be unpickled in the controller alone, or in other processes alone: elsewhere its module is not found."""

    controller: int
    here: bool
    error: type[BaseException] = ModuleNotFoundError

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        return _unpickled, (type(self), self.controller, self.here, self.error)


class KnownError(Exception):
    """The same as an exception."""

    def __init__(self, controller: int) -> None:
        """Can be unpickled in other processes than the controller's."""
        super().__init__("an error of the user's")
        self.controller = controller

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Any, ...]]:
        return _unpickled, (type(self), self.controller, False, ModuleNotFoundError)


def _unpickled(kind: type[Any], controller: int, here: bool, error: type[BaseException]) -> object:
    if (os.getpid() == controller) != here:
        raise error("No module named 'my_losses'")
    return kind(controller) if kind is KnownError else kind(controller, here, error)


@pytest.mark.stranger("B3")
def test_what_cannot_be_read_fails_its_call_alone(run: Run) -> None:
    async def test(mesh: Mesh) -> None:
        here, there = Known(os.getpid(), here=True), Known(os.getpid(), here=False)
        with pytest.raises(ArgumentsError, match=r"echo: .*No module named 'my_losses'; .*the script's folder"):
            await ask(mesh, "echo", here)
        with pytest.raises(ArgumentsError, match="doze: a process cannot read an argument"):  # a call that runs at once
            await ask(mesh, "doze", here)
        mesh.tell("echo", here)  # nobody awaits it, and the actor lives
        with pytest.raises(ArgumentsError, match="cannot read an argument of the call: SystemExit"):
            await ask(mesh, "echo", Known(os.getpid(), here=True, error=SystemExit))
        with pytest.raises(ArgumentsError, match=r"echo: an argument .* cannot be sent .*lock"):
            await ask(mesh, "echo", threading.Lock())
        with pytest.raises(ArgumentsError, match=r"echo: an argument .* cannot be sent .*lock"):
            await mesh.call("echo", lambda: [(threading.Lock(),)])
        with pytest.raises(RuntimeError, match=r"^an answer cannot be read here: ModuleNotFoundError: No module"):
            await ask(mesh, "echo", there)
        with pytest.raises(RuntimeError, match=r"^KnownError: an error of the user's") as caught:
            await ask(mesh, "echo", KnownError(os.getpid()))
        assert "toy_actor.py" in "".join(caught.value.__notes__)

    run(test)


def test_another_running_event_loop_is_refused(run: Run) -> None:
    async def test(mesh: Mesh) -> None:
        dozing = ask(mesh, "doze", 0.5)
        await asyncio.sleep(0.1)

        async def reply() -> None:  # of an environment's method that runs in a thread
            await mesh.call("add", [(2,)])

        with pytest.raises(RuntimeError, match=r"add is called in another event loop .*run_coroutine_threadsafe"):
            await asyncio.to_thread(asyncio.run, reply())
        assert await dozing == 0.5

    run(test)


async def test_an_actor_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    async with toy(tmp_path) as mesh:
        for _ in range(2):
            with pytest.raises(MeshError, match=r"rank 0 \(process \d+\) died in add: KeyError: 'TOY_GREETING'"):
                await mesh.call("add", [(1,)])
