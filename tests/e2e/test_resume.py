"""Runs that are killed and go on: the same metrics and the same model, step for step, as one that was left alone."""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.runs.comparison import is_timing
from rl.runs.folder import complete_checkpoints, read_metrics

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent.parent
RECIPE = str(Path(__file__).with_name("tiny_recipe.py"))
NUM_STEPS = 23
OPTIONS = ("--checkpoint-every", "3", "--evaluate-every", "6", "--num-steps")


def _ownloop(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OWNLOOP_TINY_MODEL": str(tmp_path / "model")}
    command = [sys.executable, "-m", "controller.commands.cli", "run", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _rows(run: Path) -> list[dict[str, float]]:
    """The metrics, timings aside."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{name: row[name] for name in row if not is_timing(name)} for row in rows]


def _weights(run: Path) -> str:
    (file,) = (run / "model").glob("*.safetensors")
    return hashlib.blake2b(file.read_bytes()).hexdigest()


def _process_of(log: Path) -> int | None:
    """The process whose output goes to a log, if it runs."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "fd" / "1").readlink() == log:
                return int(entry.name)
    return None


def _wait(run: subprocess.Popen[str], until: Callable[[], Any], every_s: float = 0.02) -> None:
    end = time.monotonic() + 400
    while not until():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end
        time.sleep(every_s)


def _wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    _wait(run, lambda: any(row["step"] >= step for row in read_metrics(folder / "metrics.jsonl")))


def _kill_controller(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    _wait_for_step(run, folder, step)
    run.kill()
    run.wait()
    end = time.monotonic() + 30  # its processes notice, and end as well
    while _process_of(folder / "logs" / "trainer-0.log") is not None:
        assert time.monotonic() < end
        time.sleep(0.1)


def _kill_trainer(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    log = folder / "logs" / "trainer-0.log"
    _wait(run, lambda: _process_of(log) is not None)
    _wait_for_step(run, folder, step)
    trainer = _process_of(log)
    assert trainer is not None
    os.kill(trainer, signal.SIGKILL)


def _kill_trainer_in_a_save(run: subprocess.Popen[str], folder: Path) -> None:
    """Stops the trainer whenever it is seen to write a checkpoint, until it is stopped before the end of that."""
    log = folder / "logs" / "trainer-0.log"
    found: list[Path] = []

    def saving() -> bool:
        found[:] = (folder / "checkpoints").glob("*/.policy.partial")
        return bool(found)

    _wait(run, lambda: _process_of(log) is not None and not saving())  # what an earlier kill left half is gone
    trainer = _process_of(log)
    assert trainer is not None
    while True:
        _wait(run, saving, every_s=0.0005)
        os.kill(trainer, signal.SIGSTOP)
        time.sleep(0.05)
        if found[0].exists():
            os.kill(trainer, signal.SIGKILL)
            return
        os.kill(trainer, signal.SIGCONT)


def test_a_run_goes_on_by_itself_without_its_trainer_and_when_told_to_without_its_controller(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    run = _ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS, "8")
    _kill_trainer(run, folder, 4)
    _wait(run, lambda: "MeshError" in (folder / "logs" / "controller.log").read_text())
    _kill_controller(run, folder, 5)
    done = [row for row in _rows(folder) if row["step"] <= 5]
    run = _ownloop(tmp_path, "--resume", "killed")
    output, _ = run.communicate(timeout=500)
    assert run.returncode == 0, output
    rows = _rows(folder)
    assert rows[: len(done)] == done
    assert [row["policy_version"] for row in rows if "policy_version" in row] == list(range(1, 9))
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00006", "step-00008"]


def test_a_job_that_is_ended_saves_its_last_step(tmp_path: Path) -> None:
    """As Slurm and systemd end a job: every process gets SIGTERM, those of the meshes too."""
    folder = tmp_path / "runs" / "ended"
    run = _ownloop(tmp_path, RECIPE, "--name", "ended", "--num-steps", "60", "--checkpoint-every", "50")
    _wait_for_step(run, folder, 2)
    meshes = [_process_of(folder / "logs" / f"{mesh}-0.log") for mesh in ("trainer", "generator")]
    for pid in (*meshes, run.pid):
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGTERM, output
    assert time.monotonic() - began < 25
    assert not any(_process_of(log) for log in (folder / "logs").iterdir())
    (saved,) = complete_checkpoints(folder / "checkpoints")
    done = int(saved.name.removeprefix("step-"))
    assert f"saving step {done}; Ctrl-C again to stop at once\nsaved step {done}\n" in output
    assert f"to go on: ownloop run --resume {folder}" in output

    rows = [row for row in _rows(folder) if row["step"] <= done and "policy_version" in row]
    assert len(rows) == done
    run = _ownloop(tmp_path, "--resume", "ended", "--num-steps", str(done + 1))
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert [row for row in _rows(folder) if "policy_version" in row][:done] == rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = _ownloop(tmp_path, RECIPE, "--name", "whole", *OPTIONS, str(NUM_STEPS))
    output, _ = whole.communicate(timeout=500)
    assert whole.returncode == 0, output
    expected = _rows(tmp_path / "runs" / "whole")

    folder = tmp_path / "runs" / "killed"
    chance = random.Random()
    first, second = chance.randrange(1, 8), chance.randrange(10, 17)
    run = _ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS, "22")
    _kill_controller(run, folder, first)

    run = _ownloop(tmp_path, "--resume", "killed", "--on-failure", "stop")
    _kill_trainer_in_a_save(run, folder)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "error: MeshError: trainer: a process died" in output
    assert f"ownloop run --resume {folder}" in output

    run = _ownloop(tmp_path, "--resume", str(folder), "--on-failure", "restart")
    _kill_trainer(run, folder, second)  # it goes on by itself
    _wait_for_step(run, folder, second + 2)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output

    # The configuration that it began with had fewer steps.
    run = _ownloop(tmp_path, "--resume", "killed", "--num-steps", str(NUM_STEPS))
    output, _ = run.communicate(timeout=500)
    assert run.returncode == 0, output
    assert _rows(folder) == expected, f"killed after steps {first} and {second}"
    assert _weights(folder) == _weights(tmp_path / "runs" / "whole")
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00021", "step-00023"]
