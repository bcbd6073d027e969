"""A generator's handle finds an engine that died or hangs, though its actor answers. The ranks answer from a table."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.handles.generator_handle import GeneratorHandle
from controller.processes.errors import DeadlineError, MeshError, RequestTimeoutError
from controller.processes.mesh import Mesh
from controller.processes.rank_processes import RankProcesses
from generator.config import GeneratorConfig
from generator.engine_calls import EngineStatus, EngineStoppedError
from rl.deadlines import Deadlines
from rl.types import SamplingParams
from rl.weights.version import VersionRecords
from tests.waiting import VirtualLoop, run_virtual

pytestmark = pytest.mark.virtual

IDLE = EngineStatus(activity=None, seconds=0.0, slowest_s=None, num_steps=7, num_unfinished=0, failure=None)
STEP = replace(IDLE, activity="step", slowest_s=0.5, num_unfinished=3)
CONFIG = GeneratorConfig(deadlines=Deadlines(at_least_s=5, times_slowest=20))


class FakeMesh(Mesh):
    """Ranks whose requests never end, unless with an error."""

    def __init__(self, *statuses: EngineStatus, error: Exception | None = None) -> None:
        logs = tuple(Path(f"/nowhere/{rank}.log") for rank in range(len(statuses)))
        super().__init__("generator", None, None, RankProcesses((), logs))
        self.statuses = list(statuses)
        self.error = error
        self.num_probes = 0
        self.num_calls_that_end = 0
        self.cancelled: list[str] = []
        self.pause_s = self.answer_s = 0.0

    def rank(self, index: int) -> "FakeRank":
        return FakeRank(self, index)


class FakeRank:
    """Where calls to one rank of a `FakeMesh` are sent."""

    def __init__(self, mesh: FakeMesh, index: int) -> None:
        self._mesh = mesh
        self._index = index

    def packed(self, verb: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        del verb
        return args

    def send(self, verb: str, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        if verb == "cancel":
            self._mesh.cancelled += arguments
        answer: asyncio.Future[Any] = asyncio.ensure_future(getattr(self, verb)(*arguments))
        answer.add_done_callback(lambda _: answer.cancelled() or answer.exception())  # nobody may ask for it
        return answer

    async def status(self) -> EngineStatus:
        self._mesh.num_probes += 1
        if self._mesh.cancelled:  # the request has timed out
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.now += self._mesh.pause_s
            await asyncio.sleep(self._mesh.answer_s)
        return self._mesh.statuses[self._index]

    async def generate(self, *_: object) -> list[object]:
        if self._mesh.error is not None:
            raise self._mesh.error
        if self._mesh.num_calls_that_end > 0:
            self._mesh.num_calls_that_end -= 1
            return []
        await asyncio.Event().wait()
        raise AssertionError("it never ends")

    async def cancel(self, call_id: str) -> None:
        raise AssertionError(f"nobody waits for the answer to the cancellation of {call_id}")


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


async def test_an_engine_that_makes_progress_is_left_alone() -> None:
    config = replace(CONFIG, request_timeout_s=10)
    mesh = FakeMesh(replace(STEP, seconds=9.0), replace(STEP, seconds=600.0, slowest_s=40.0))

    with pytest.raises(RequestTimeoutError, match=r"generator: a request took longer than 10 s"):
        await _generate(mesh, config)
    assert len(mesh.cancelled) == 1
    num_probes = mesh.num_probes
    assert num_probes > 2
    await asyncio.sleep(60)
    assert mesh.num_probes == num_probes


async def test_after_a_slow_request_the_time_in_which_the_host_is_paused_does_not_count() -> None:
    config, mesh = replace(CONFIG, request_timeout_s=10), FakeMesh(replace(STEP, seconds=1.0))
    mesh.pause_s, mesh.answer_s = 60.0, 5.0
    with pytest.raises(RequestTimeoutError, match="a request took longer than 10 s"):
        await _generate(mesh, config)
    mesh.pause_s, mesh.answer_s = 0.0, 15.0
    with pytest.raises(DeadlineError, match="generator: it hangs: no answer within 10 s"):
        await _generate(mesh, config)


async def test_a_call_that_follows_another_at_once_is_watched() -> None:
    mesh = FakeMesh(replace(STEP, seconds=11.0))
    mesh.num_calls_that_end = 1
    handle = GeneratorHandle(mesh, CONFIG, VersionRecords())

    sampling = SamplingParams(max_tokens=4)
    assert await handle.generate([1, 2], sampling) == []
    with pytest.raises(DeadlineError, match="engine of rank 0 has been in one step for 11 s"):
        await handle.generate([1, 2], sampling)


PROMPT, SAMPLING = [5, 6], SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("verb", "arguments", "options", "message"),
    [
        ("generate", (PROMPT, {"max_tokens": 5}), {}, r"sampling is \{'max_tokens': 5\}; it must be Sampl"),
        ("generate", (PROMPT, SamplingParams(max_tokens=2047)), {}, "2 tokens and max_tokens=2047 need 2049 tokens"),
        ("generate", (PROMPT, SAMPLING, 0), {}, "num_samples is 0"),
        ("generate", ([], SAMPLING), {}, "prompt_tokens is empty"),
        ("generate", ("What is 2+2?", SAMPLING), {}, "prompt_tokens starts with .*; it must be token ids"),
        ("generate", ([5, 6.5], SAMPLING), {}, "prompt_tokens starts with .*; it must be token ids"),
        ("generate", ([[5, 6]], SAMPLING), {}, "prompt_tokens starts with .*; it must be token ids"),
        ("generate", (PROMPT, SAMPLING), {"policy": "a"}, "policy is 'a'; set GeneratorConfig.lora"),
        ("pull_model_state_dict", (1,), {"mode": "drian"}, "mode is 'drian', which is not known; did you mean 'drain'"),
        ("pull_model_state_dict", (1,), {"policy": "a"}, "policy is 'a'; set GeneratorConfig.lora"),
        ("pull_model_state_dict", (1,), {"frozen": True}, "frozen is True and policy is None"),
        ("generate", (PROMPT, SAMPLING), {"policy": (None, 0)}, "the model itself has no frozen versions"),
        ("drop_policy", ("a",), {}, "policy is 'a'; set GeneratorConfig.lora"),
        ("drop_policy", (None,), {}, "policy is None; the model itself cannot be dropped"),
    ],
)
def test_mistakes_are_refused_before_a_rank_is_called(
    verb: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    handle = GeneratorHandle(Mesh("generator", None, None, RankProcesses((), ())), CONFIG, VersionRecords())
    with pytest.raises(ValueError, match=message):
        run_virtual(getattr(handle, verb)(*arguments, **options))
