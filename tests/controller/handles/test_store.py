"""A process may have store after store; and the shim that makes TorchStore run on today's Monarch is still needed."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchstore
from monarch._src.actor.endpoint import EndpointProperty
from torchstore.controller import Controller

from controller.handles.store import AsyncController, WeightStore
from controller.processes.errors import MeshError
from tests.e2e.weight_meshes import running_store
from tests.waiting import LIMIT_S, wait_for_ends


def _asynchronous(actor: type[Any]) -> set[bool]:
    import inspect

    endpoints = [getattr(actor, name) for name in dir(actor)]
    methods: list[Callable[..., Any]] = [e._method for e in endpoints if isinstance(e, EndpointProperty)]  # pyright: ignore[reportPrivateUsage]
    return {inspect.iscoroutinefunction(method) for method in methods}


def test_the_shim_is_still_needed() -> None:
    assert _asynchronous(Controller) == {True, False}, "TorchStore's Controller can be spawned: remove AsyncController"


def test_the_shim_makes_every_endpoint_asynchronous() -> None:
    assert _asynchronous(AsyncController) == {True}


async def _keeps(store: WeightStore, value: str) -> bool:
    client = await torchstore.client(store.name)
    await client.put("key", value)
    return await client.get("key") == value


def _printed(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("store: its directory")]


@pytest.mark.e2e
async def test_a_store_starts_after_one_that_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running_store(tmp_path / "first", teardown_s=LIMIT_S) as first:
        assert await _keeps(first, "first")
        os.kill(first.mesh.pids[0], signal.SIGKILL)
        with pytest.raises(MeshError):
            await first.mesh.call("reset", [()] * first.mesh.num_ranks)
        await first.stop()
        async with running_store(tmp_path / "second", teardown_s=LIMIT_S) as second:
            assert await _keeps(second, "second")
    (line,) = _printed(capfd.readouterr().out)
    assert re.search(r"could not forget its keys: MeshError: store: .*died", line)


def _is_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped, which the kernel may take a moment for."""
    stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats} == {"T"}


@pytest.mark.e2e
@pytest.mark.slow
async def test_a_store_starts_after_one_whose_end_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running_store(tmp_path / "first", teardown_s=0.5) as first:
        assert await _keeps(first, "first")
        os.kill(first.mesh.pids[0], signal.SIGSTOP)
        while not _is_stopped(first.mesh.pids[0]):
            await asyncio.sleep(0.01)
        await first.stop()
        wait_for_ends(first.mesh.pids, "the store")
        async with running_store(tmp_path / "second", teardown_s=LIMIT_S) as second:
            assert await _keeps(second, "second")
    assert _printed(capfd.readouterr().out) == ["store: its directory did not forget its keys within 0.5 s"]


@pytest.mark.e2e
@pytest.mark.slow
async def test_two_stores_at_a_time_hold_their_own_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with running_store(tmp_path / "a", teardown_s=LIMIT_S) as a:
        async with running_store(tmp_path / "b", teardown_s=LIMIT_S) as b:
            assert await _keeps(a, "of a")
            assert await _keeps(b, "of b")
            assert await (await torchstore.client(a.name)).get("key") == "of a"
        assert await _keeps(a, "after the other's end")
    assert _printed(capfd.readouterr().out) == []
