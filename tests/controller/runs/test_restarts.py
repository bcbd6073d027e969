"""A loop that fails begins again after its checkpoint, as often as its configuration allows."""

import asyncio
import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.launching.hosts import Cluster, Tell
from controller.launching.launcher import Launcher
from controller.processes.errors import DeadlineError, MeshError
from controller.runs import Console, LoopConfig, RunFolder
from controller.runs.restarts import RestartLimit, run_with_restarts
from trainer.config import TrainerConfig

CONFIG = LoopConfig(model="", trainer=TrainerConfig(), num_steps=4, learning_rate=0.0)


class FailingLoop:
    """Raises these errors, one each time it is begun, and then comes to its end."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.resumed: list[bool] = []

    async def __call__(self, config: LoopConfig, folder: RunFolder, console: Console) -> None:
        self.resumed.append(folder.resumed)
        if self.errors:
            raise self.errors.pop(0)


def _run(path: Path, config: Any, *errors: BaseException) -> tuple[FailingLoop, str, BaseException | None]:
    """The loop after its run, what the user saw, and what the run raised."""
    loop, stream, raised = FailingLoop(*errors), io.StringIO(), None
    try:
        asyncio.run(run_with_restarts(loop, config, RunFolder(path / "run", config), Console(stream)))
    except BaseException as error:
        raised = error
    return loop, stream.getvalue(), raised


def test_a_dead_mesh_makes_the_loop_go_on_in_its_folder(tmp_path: Path) -> None:
    died, hung = MeshError("trainer", "a process died"), DeadlineError("store", "no answer within 9 s")
    loop, shown, raised = _run(tmp_path, CONFIG, died, hung)
    assert raised is None
    assert loop.resumed == [False, True, True]
    assert "trainer failed: a process died" in shown
    assert "restarting after the newest checkpoint (2 of at most 3 restarts in 60 minutes)" in shown


def test_one_failure_more_than_allowed_ends_the_run(tmp_path: Path) -> None:
    errors = [MeshError("trainer", f"death {number}") for number in range(3)]
    loop, shown, raised = _run(tmp_path, replace(CONFIG, max_restarts=2), *errors)
    assert raised is errors[2]
    assert len(loop.resumed) == 3
    assert "not restarted again: 2 of at most 2 restarts in 60 minutes" in shown


class OtherHosts:
    """Hosts that no loop connects to."""

    async def connect(self) -> Cluster:
        raise AssertionError("the loop does not pass them on")

    @asynccontextmanager
    async def kept(self, tell: Tell) -> AsyncGenerator[None]:
        yield


def test_a_loop_that_does_not_pass_its_hosts_on_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, hosts=OtherHosts())

    async def loop(config: LoopConfig, folder: RunFolder, console: Console) -> None:
        async with Launcher(folder.logs):
            raise AssertionError("processes would start here")

    with pytest.raises(ValueError, match=r"the run has hosts, .* have the loop pass them on: .*config\.hosts\)"):
        asyncio.run(run_with_restarts(loop, config, RunFolder(tmp_path / "run", config), Console(io.StringIO())))


@pytest.mark.parametrize("error", [ValueError("a mistake"), RuntimeError("a bug"), asyncio.CancelledError()])
def test_what_is_no_failure_of_a_process_is_raised_at_once(tmp_path: Path, error: BaseException) -> None:
    loop, _, raised = _run(tmp_path, CONFIG, error)
    assert type(raised) is type(error)
    assert len(loop.resumed) == 1


def test_a_run_that_is_to_stop_stops(tmp_path: Path) -> None:
    loop, _, raised = _run(tmp_path, replace(CONFIG, max_restarts=0), MeshError("trainer", "a process died"))
    assert isinstance(raised, MeshError)
    assert len(loop.resumed) == 1


def test_old_restarts_no_longer_count() -> None:
    now = 0.0
    limit = RestartLimit(replace(CONFIG, max_restarts=2, restart_window_minutes=1.0), clock=lambda: now)
    assert [limit.allows_another() for _ in range(3)] == [True, True, False]
    now = 59.0
    assert not limit.allows_another()
    now = 60.0
    assert [limit.allows_another() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize(("field", "value"), [("max_restarts", -1), ("restart_window_minutes", 0.0)])
def test_a_wrong_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value!r}"):
        replace(CONFIG, **{field: value})
