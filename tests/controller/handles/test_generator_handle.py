"""A generator's handle finds an engine that died or hangs, though its actor answers. The ranks answer from a table."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.handles.generator_handle import GeneratorHandle
from controller.handles.version_records import VersionRecords
from controller.processes.errors import DeadlineError, MeshError, RequestTimeoutError
from controller.processes.mesh import Mesh
from generator.config import GeneratorConfig
from generator.engine_calls import EngineStatus, EngineStoppedError
from rl.deadlines import Deadlines
from rl.types import SamplingParams
from tests.waiting import run_virtual

IDLE = EngineStatus(activity=None, seconds=0.0, slowest_s=None, num_steps=7, num_unfinished=0, failure=None)
STEP = replace(IDLE, activity="step", slowest_s=0.5, num_unfinished=3)
CONFIG = GeneratorConfig(deadlines=Deadlines(at_least_s=5, times_slowest=20))


class FakeMesh(Mesh):
    """Ranks whose requests never end, unless with an error."""

    def __init__(self, *statuses: EngineStatus, error: Exception | None = None) -> None:
        super().__init__(
            "generator", None, None, (), tuple(Path(f"/nowhere/{rank}.log") for rank in range(len(statuses)))
        )
        self.statuses = list(statuses)
        self.error = error
        self.num_probes = 0
        self.num_calls_that_end = 0
        self.cancelled: list[str] = []

    def rank(self, index: int) -> Any:
        async def status() -> EngineStatus:
            self.num_probes += 1
            return self.statuses[index]

        async def generate() -> list[object]:
            if self.error is not None:
                raise self.error
            if self.num_calls_that_end > 0:
                self.num_calls_that_end -= 1
                return []
            await asyncio.Event().wait()
            raise AssertionError("it never ends")

        def call(*_: object) -> asyncio.Future[list[object]]:
            answer = asyncio.ensure_future(generate())
            answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())  # nobody may ask for it
            return answer

        return SimpleNamespace(
            status=SimpleNamespace(call_one=status),
            generate=SimpleNamespace(call_one=call),
            cancel=SimpleNamespace(broadcast=self.cancelled.append),
        )


def _generate(mesh: FakeMesh, config: GeneratorConfig = CONFIG) -> Coroutine[Any, Any, object]:
    handle = GeneratorHandle(mesh, config, VersionRecords())
    return handle.generate([1, 2], SamplingParams(max_tokens=4))


def test_an_exception_in_the_engine_is_a_death_with_that_cause() -> None:
    mesh = FakeMesh(IDLE, error=EngineStoppedError("the generation engine has stopped: OutOfMemoryError: CUDA"))
    with pytest.raises(MeshError, match=r"generator: .* stopped: OutOfMemoryError: CUDA") as caught:
        run_virtual(_generate(mesh))
    assert isinstance(caught.value.__cause__, EngineStoppedError)
    assert (caught.value.rank, caught.value.verb) == (0, "generate")
    with pytest.raises(MeshError, match="OutOfMemoryError"):  # the mesh has been killed
        run_virtual(_generate(mesh))


def test_the_cause_wins_over_a_connection_error_of_another_rank() -> None:
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    statuses = (replace(IDLE, failure=gloo), replace(IDLE, failure="OutOfMemoryError: CUDA"))
    with pytest.raises(MeshError, match="engine of rank 1 has stopped: OutOfMemoryError: CUDA"):
        run_virtual(_generate(FakeMesh(*statuses, error=EngineStoppedError(gloo))))


def test_an_engine_that_hangs_or_died_on_a_rank_is_found() -> None:
    hangs = replace(STEP, seconds=11.0)
    message = r"engine of rank 0 has been in one step for 11 s \(the slowest so far took 0.5 s\), with 3 unfinished"
    with pytest.raises(DeadlineError, match=message) as caught:
        run_virtual(_generate(FakeMesh(hangs)))
    assert caught.value.verb == "step"
    died = replace(IDLE, failure="RuntimeError: CUDA error")
    with pytest.raises(MeshError, match="engine of rank 1 has stopped: RuntimeError: CUDA error"):
        run_virtual(_generate(FakeMesh(replace(STEP, seconds=1.0), died)))


def test_an_engine_that_makes_progress_is_left_alone() -> None:
    config = replace(CONFIG, request_timeout_s=10)
    mesh = FakeMesh(replace(STEP, seconds=9.0), replace(STEP, seconds=600.0, slowest_s=40.0))

    async def main() -> None:
        with pytest.raises(RequestTimeoutError, match=r"generator: a request took longer than 10 s"):
            await _generate(mesh, config)
        assert len(mesh.cancelled) == 1
        num_probes = mesh.num_probes
        assert num_probes > 2
        await asyncio.sleep(60)
        assert mesh.num_probes == num_probes

    run_virtual(main())


def test_a_call_that_follows_another_at_once_is_watched() -> None:
    mesh = FakeMesh(replace(STEP, seconds=11.0))
    mesh.num_calls_that_end = 1
    handle = GeneratorHandle(mesh, CONFIG, VersionRecords())

    async def main() -> None:
        sampling = SamplingParams(max_tokens=4)
        assert await handle.generate([1, 2], sampling) == []
        with pytest.raises(DeadlineError, match="engine of rank 0 has been in one step for 11 s"):
            await handle.generate([1, 2], sampling)

    run_virtual(main())
