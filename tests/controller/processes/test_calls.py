"""When the controller stops to wait for a call: deadlines, and one rank's failure. The ranks are coroutines.

The seconds are those of a virtual clock.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from controller.processes.calls import Calls
from controller.processes.errors import DeadlineError, MeshError, ProcessDiedError
from controller.processes.rank_processes import RankProcesses
from rl.deadlines import Deadlines
from tests.waiting import run_virtual

LOGS = (Path("/nowhere/0.log"), Path("/nowhere/1.log"))
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9")


async def _takes(seconds: float, error: Exception | None = None) -> float:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return seconds


async def _cancelled(call: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(call)
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def _run(test: Callable[[Calls], Awaitable[None]]) -> None:
    async def main() -> None:
        deadlines = Deadlines(first_s=100, at_least_s=2, times_slowest=4)
        await test(Calls("trainer", RankProcesses((), LOGS), deadlines))

    run_virtual(main())


def test_a_deadline_follows_the_slowest_call_of_the_verb() -> None:
    async def test(calls: Calls) -> None:
        await calls.wait("step", {0: _takes(1.5)})  # the first has 100 s
        await calls.wait("step", {0: _takes(3)})  # 4 times 1.5 s
        with pytest.raises(DeadlineError, match=r"rank 0 did not answer step within its deadline of 12 s") as caught:
            await calls.wait("step", {0: _takes(600)})
        assert (caught.value.mesh, caught.value.rank, caught.value.verb) == ("trainer", 0, "step")
        with pytest.raises(DeadlineError, match="did not answer step"):  # the mesh has been killed
            await calls.wait("save", {0: _takes(0.0)})

    _run(test)


def test_a_call_unlike_earlier_ones_has_a_first_calls_deadline() -> None:
    async def test(calls: Calls) -> None:
        await calls.wait("step", {0: _takes(0.0)}, size=10)
        await calls.wait("step", {0: _takes(5)}, size=21)
        await calls.wait("save", {0: _takes(0.0)}, varies=True)
        await calls.wait("save", {0: _takes(5)}, varies=True)

    _run(test)


def test_a_call_behind_others_waits_without_its_clock_running() -> None:
    async def test(calls: Calls) -> None:
        await calls.wait("step", {0: _takes(0.0)})
        slow = asyncio.create_task(calls.wait("forward", {0: _takes(6)}))
        await asyncio.sleep(0)
        await calls.wait("step", {0: _takes(7)})  # 1 s of its own; its deadline is 2 s
        assert slow.done()
        slow = asyncio.create_task(calls.wait("backward", {0: _takes(600)}))
        await calls.wait("status", {0: _takes(0)}, wait="at once")
        with pytest.raises(DeadlineError, match="did not answer status"):
            await calls.wait("status", {0: _takes(600)}, wait="at once")
        with pytest.raises(DeadlineError, match="did not answer status"):
            await slow

    _run(test)


def test_a_cancelled_call_is_executed_and_the_next_one_waits() -> None:
    async def test(calls: Calls) -> None:
        turn = asyncio.Lock()

        async def executes(seconds: float) -> None:
            async with turn:
                await asyncio.sleep(seconds)

        async def answer(seconds: float) -> None:
            await asyncio.shield(asyncio.ensure_future(executes(seconds)))  # cancelling it does not reach the rank

        await calls.wait("step", {0: answer(0.0)})
        await _cancelled(calls.wait("forward", {0: answer(6)}))
        await calls.wait("step", {0: answer(0.0)})  # its deadline is 2 s
        await _cancelled(calls.wait("step", {0: answer(1)}))
        await asyncio.sleep(5)  # nobody looks at a call that is executed while nobody waits
        await calls.wait("step", {0: answer(1)})

    _run(test)


def test_a_cancelled_call_that_hangs_ends_the_call_behind_it() -> None:
    async def hangs(calls: Calls) -> None:
        await calls.wait("step", {0: _takes(0.0)})
        await _cancelled(calls.wait("step", {0: _takes(600)}))
        with pytest.raises(DeadlineError, match=r"rank 0 did not answer step within its deadline of 2 s"):
            await calls.wait("save", {0: _takes(600)})

    async def fails_alone(calls: Calls) -> None:
        await _cancelled(calls.wait("step", {0: _takes(1), 1: _takes(1, MemoryError("no room"))}))
        with pytest.raises(MeshError, match="rank 1 raised MemoryError in step: no room; its state is not that"):
            await calls.wait("save", {0: _takes(600), 1: _takes(600)})

    async def fails(calls: Calls) -> None:
        await _cancelled(calls.wait("step", {0: _takes(1, ValueError("bad"))}))
        await calls.wait("save", {0: _takes(3)})

    for test in (hangs, fails_alone, fails):
        _run(test)


def test_a_failure_that_all_ranks_share_is_raised_as_it_is() -> None:
    async def test(calls: Calls) -> None:
        calls.is_consequence = lambda error: "another rank" in str(error)
        for first, second in ((0.0, 0.5), (0.5, 0.0)):
            answers = {
                0: _takes(first, RuntimeError("another rank failed")),
                1: _takes(second, ArithmeticError("mine")),
            }
            with pytest.raises(ArithmeticError, match="mine"):
                await calls.wait("step", {**answers})
        assert calls.failure is None

    _run(test)


def test_one_ranks_failure_alone_ends_the_mesh() -> None:
    async def goes_on(calls: Calls) -> None:
        with pytest.raises(
            MeshError, match="rank 1 raised MemoryError in step: no room; its state is not that"
        ) as caught:
            await calls.wait("step", {0: _takes(0.5), 1: _takes(0, MemoryError("no room"))})
        assert isinstance(caught.value.__cause__, MemoryError)

    async def waits(calls: Calls) -> None:
        start = asyncio.get_running_loop().time()
        other = asyncio.create_task(calls.wait("step", {0: _takes(600), 1: _takes(600)}))
        await asyncio.sleep(0)
        with pytest.raises(MeshError, match="rank 1 raised MemoryError in poke: no room; rank 0 did not answer"):
            await calls.wait("poke", {0: _takes(600), 1: _takes(0, MemoryError("no room"))}, wait="at once")
        with pytest.raises(MeshError, match="rank 1 raised MemoryError in poke"):
            await other
        assert asyncio.get_running_loop().time() - start < 30

    _run(goes_on)
    _run(waits)


def test_a_failure_reaches_all_calls_of_a_later_event_loop() -> None:
    async def fails(calls: Calls) -> None:
        other = asyncio.create_task(calls.wait("generate", {0: _takes(600)}, wait="watched"))
        await asyncio.sleep(0)
        with pytest.raises(MeshError, match="rank 0 did not answer poke"):
            await calls.wait("poke", {0: _takes(600)}, wait="at once")
        with pytest.raises(MeshError, match="rank 0 did not answer poke"):
            await asyncio.wait_for(other, 1)

    calls = Calls("trainer", RankProcesses((), LOGS), Deadlines(first_s=100))
    run_virtual(calls.wait("step", {0: _takes(1)}))
    run_virtual(fails(calls))


def test_the_cause_wins_over_connection_errors_that_came_first() -> None:
    async def an_exception(calls: Calls) -> None:
        with pytest.raises(MeshError, match="rank 1 raised MemoryError in step: no room"):
            await calls.wait("step", {0: _takes(0, GLOO), 1: _takes(1, MemoryError("no room"))})

    async def a_death(calls: Calls) -> None:
        with pytest.raises(MeshError, match="died in step: Killed"):
            await calls.wait("step", {0: _takes(0, GLOO), 1: _takes(1, ProcessDiedError("Killed"))})

    async def neither(calls: Calls) -> None:
        with pytest.raises(MeshError, match=r"rank 0 raised RuntimeError in step: .*gloo"):
            await calls.wait("step", {0: _takes(0, GLOO)})

    for test in (an_exception, a_death, neither):
        _run(test)


def test_a_mesh_that_is_needed_and_has_failed_is_named() -> None:
    async def test(calls: Calls) -> None:
        store = Calls("store", RankProcesses((), ()), Deadlines())
        await calls.wait("push", {0: _takes(0.5)}, needs=lambda: [store])
        store.fail(MeshError("store", "rank 0 died", rank=0))
        with pytest.raises(MeshError, match="store: rank 0 died"):
            await calls.wait("push", {0: _takes(0, ValueError("no store"))}, needs=lambda: [store])
        await calls.wait("step", {0: _takes(0.5)})  # its ranks did not wait for the store
        with pytest.raises(MeshError, match="store: rank 0 died"):
            await calls.wait("push", {0: _takes(600)}, needs=lambda: [store])
        with pytest.raises(MeshError, match="store: rank 0 died"):
            await calls.wait("step", {0: _takes(0.5)})

    async def later(calls: Calls) -> None:
        needed, lost = list[Calls](), Calls("weights-n1", RankProcesses((), ()), Deadlines())
        lost.fail(MeshError("weights-n1", "host n1 is lost"))
        asyncio.get_running_loop().call_later(1, needed.append, lost)
        with pytest.raises(MeshError, match="weights-n1: host n1 is lost"):
            await calls.wait("push", {0: _takes(600)}, needs=lambda: needed)

    _run(test)
    _run(later)


@pytest.mark.parametrize(
    ("field", "value"), [("first_s", 0.0), ("at_least_s", -1.0), ("times_slowest", 0.5), ("stopped_s", float("nan"))]
)
def test_impossible_deadlines_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"Deadlines\.{field} is {value}"):
        Deadlines(**{field: value})
