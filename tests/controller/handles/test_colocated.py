"""Trainers and a generator on the same GPUs: who holds memory when."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controller.handles.colocated import SharedGPUs, Side
from controller.processes.errors import MeshError

pytestmark = pytest.mark.virtual

Events = list[str]


class Memory:
    """A member that notes when it has memory."""

    def __init__(self, name: str, events: Events) -> None:
        self.name, self.events = name, events
        self.dies = False
        self.begins_in_s = 0.0
        self.mesh: Any = SimpleNamespace()

    async def take_memory(self) -> None:
        await asyncio.sleep(self.begins_in_s)
        self.events.append(f"{self.name} begins")

    async def free_memory(self) -> None:
        await asyncio.sleep(0)
        if self.dies:
            raise MeshError(self.name, "a process died")
        self.events.append(f"{self.name} ends")


@pytest.fixture
def events() -> Events:
    return []


async def settle() -> None:
    """Regpus when every task waits: the virtual clock moves no earlier."""
    await asyncio.sleep(0.01)


async def started(events: Events) -> tuple[SharedGPUs, Memory, Memory]:
    gpus, trainer, replica = SharedGPUs(), Memory("trainer", events), Memory("replica", events)
    async with gpus.phase("train"):
        gpus.join("train", trainer)
    async with gpus.phase("sample"):
        gpus.join("sample", replica)
    return gpus, trainer, replica


async def call(gpus: SharedGPUs, side: Side, name: str, events: Events, until: asyncio.Event | None = None) -> None:
    async with gpus.phase(side):
        events.append(name)
        if until is not None:
            await until.wait()
        await asyncio.sleep(0)
        events.append(f"{name} done")


async def test_gpu_logic_a_side_frees_memory_before_the_other_takes_it(events: Events) -> None:
    gpus, _, _ = await started(events)
    assert events == ["trainer ends"]  # before the replica started
    events.clear()
    for side in ("train", "train", "sample", "train"):
        await call(gpus, side, side, events)
    assert events == [
        *("replica ends", "trainer begins", "train", "train done", "train", "train done"),
        *("trainer ends", "replica begins", "sample", "sample done"),
        *("replica ends", "trainer begins", "train", "train done"),
    ]


async def test_gpu_logic_calls_of_a_side_run_together_and_take_turns(events: Events) -> None:
    gpus, _, _ = await started(events)
    events.clear()
    release = asyncio.Event()
    tasks = [asyncio.create_task(call(gpus, "sample", f"s{i}", events, release)) for i in range(2)]
    await settle()
    assert events == ["s0", "s1"]
    tasks.append(asyncio.create_task(call(gpus, "train", "t", events)))
    await settle()
    assert events == ["s0", "s1"], "the trainer waits for running requests"
    release.set()
    await tasks[0]
    tasks.append(asyncio.create_task(call(gpus, "sample", "s2", events)))
    await asyncio.gather(*tasks)
    training_phase = ["replica ends", "trainer begins", "t", "t done"]
    assert events[4:] == [*training_phase, "trainer ends", "replica begins", "s2", "s2 done"]


async def test_gpu_logic_a_restart_is_not_held_up_by_requests(events: Events) -> None:
    """A request waits for its replica's successor, and a trainer's call for the request: the successor must start."""

    gpus, _, _ = await started(events)
    restarted = asyncio.Event()
    request = asyncio.create_task(call(gpus, "sample", "request", events, restarted))
    await settle()
    step = asyncio.create_task(call(gpus, "train", "step", events))
    await settle()
    async with gpus.phase("sample"):
        restarted.set()
    await asyncio.gather(request, step)
    assert events[-2:] == ["step", "step done"]


async def test_gpu_logic_a_cancelled_call_holds_nothing_up(events: Events) -> None:
    gpus, trainer, replica = await started(events)
    forever = asyncio.Event()
    request = asyncio.create_task(call(gpus, "sample", "request", events, forever))
    await settle()
    waiting = asyncio.create_task(call(gpus, "train", "cancelled", events))
    await settle()
    waiting.cancel()
    request.cancel()
    await asyncio.gather(waiting, request, return_exceptions=True)
    replica.dies = True
    await call(gpus, "train", "step", events)
    await call(gpus, "sample", "request", events)
    assert events[-4:] == ["step done", "trainer ends", "request", "request done"]
    assert "replica begins" not in events, "it is gone; its successor joins by itself"
    trainer.dies = True
    with pytest.raises(MeshError):
        async with gpus.phase("train"):
            raise MeshError("trainer", "a process died")  # by the call itself, which is what a loop sees


async def test_gpu_logic_a_cancelled_switch_ends_before_the_next(events: Events) -> None:
    gpus, trainer, replica = await started(events)
    await call(gpus, "train", "step", events)
    events.clear()
    trainer.begins_in_s, replica.begins_in_s = 0.01, 0.1
    request = asyncio.create_task(call(gpus, "sample", "cancelled", events))
    while "trainer ends" not in events:
        await settle()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await call(gpus, "train", "save", events)
    assert events == ["trainer ends", "replica begins", "replica ends", "trainer begins", "save", "save done"]


async def test_gpu_logic_meshes_that_share_a_gpu_start_in_turn(events: Events) -> None:
    async def start(gpus: SharedGPUs, name: str, *on: str) -> None:
        async with gpus.starting(on):
            events.append(f"{name} starts")
            await asyncio.sleep(1)
            events.append(f"{name} is ready")

    gpus = SharedGPUs()
    await asyncio.gather(start(gpus, "a", "1", "0"), start(gpus, "b", "0", "1"), start(gpus, "c", "2"))
    async with gpus.starting(None), gpus.starting(None):
        pass
    assert sorted(events[:2]) == ["a starts", "c starts"]
    assert [event for event in events if event[0] != "c"] == ["a starts", "a is ready", "b starts", "b is ready"]
