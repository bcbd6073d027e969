"""Runs that are killed and go on: the same metrics and the same model, step for step, as one that was left alone."""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.kills.cell import process_of
from controller.runs.folder import complete_checkpoints
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait, wait_for_step
from tests.waiting import wait_for_end, wait_until

pytestmark = pytest.mark.e2e

RECIPE = str(Path(__file__).with_name("tiny_recipe.py"))
NUM_STEPS = 23
OPTIONS = ("--checkpoint-every", "3", "--evaluate-every", "6", "--num-steps")


def _kill_trainer(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    log = folder / "logs" / "trainer-0.log"
    wait(run, lambda: process_of(log) is not None)
    wait_for_step(run, folder, step)
    trainer = process_of(log)
    assert trainer is not None
    os.kill(trainer, signal.SIGKILL)


def _kill_trainer_in_a_save(run: subprocess.Popen[str], folder: Path) -> None:
    """Stops the trainer whenever it is seen to write a checkpoint, until it is stopped before the end of that."""
    log = folder / "logs" / "trainer-0.log"
    found: list[Path] = []

    def saving() -> bool:
        found[:] = (folder / "checkpoints").glob("*/.policy.partial")
        return bool(found)

    wait(run, lambda: process_of(log) is not None and not saving())  # what an earlier kill left half is gone
    trainer = process_of(log)
    assert trainer is not None
    while True:
        wait(run, saving, every_s=0.0005)
        os.kill(trainer, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(trainer), "the trainer to stop", every_s=0.001)
        if found[0].exists():
            os.kill(trainer, signal.SIGKILL)
            return
        os.kill(trainer, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.mark.slow  # `.ci/run` runs the cells of tests/benchmarks/test_kill_cells.py
@pytest.mark.timeout(600)
def test_a_run_outlives_its_trainer_and_resumes_without_more(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    run = ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS, "8")
    _kill_trainer(run, folder, 4)
    wait(run, lambda: "MeshError" in (folder / "logs" / "controller.log").read_text())
    kill_controller(run, folder, 5)
    done = [row for row in metric_rows(folder) if row["step"] <= 5]
    run = ownloop(tmp_path, "--resume", "killed")
    status, output, _ = wait_for_end(run, "the run", 500)
    assert status == 0, output
    rows = metric_rows(folder)
    assert rows[: len(done)] == done
    assert [row["policy_version"] for row in rows if "policy_version" in row] == list(range(1, 9))
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00006", "step-00008"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_trainer_generator_and_store_that_die_together(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "killed"
    logs = [folder / "logs" / f"{name}-0.log" for name in ("store", "trainer", "generator")]
    run = ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS, "12")
    for step in (2, 5, 8):  # at some moment of the step after it
        wait(run, lambda: all(process_of(log) is not None for log in logs))
        wait_for_step(run, folder, step)
        processes = [pid for log in logs if (pid := process_of(log)) is not None]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        wait_for_step(run, folder, step + 2)
        assert time.monotonic() - began < 120, "it heard of it at once, and began again"
    status, output, _ = wait_for_end(run, "the run", 500)
    assert status == 0, output
    assert output.count("restarting after the newest checkpoint") == 3
    assert [row["policy_version"] for row in metric_rows(folder) if "policy_version" in row] == list(range(1, 13))


@pytest.mark.slow
def test_a_job_that_is_ended_saves_its_last_step(tmp_path: Path) -> None:
    """As Slurm and systemd end a job: every process gets SIGTERM, those of the meshes too."""
    folder = tmp_path / "runs" / "ended"
    run = ownloop(tmp_path, RECIPE, "--name", "ended", "--num-steps", "60", "--checkpoint-every", "50")
    wait_for_step(run, folder, 2)
    meshes = [process_of(folder / "logs" / f"{mesh}-0.log") for mesh in ("trainer", "generator")]
    for pid in (*meshes, run.pid):
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
    status, output, _ = wait_for_end(run, "the run")
    assert status == 128 + signal.SIGTERM, output
    assert not any(process_of(log) for log in (folder / "logs").iterdir())
    (saved,) = complete_checkpoints(folder / "checkpoints")
    done = int(saved.name.removeprefix("step-"))
    assert f"saving step {done}; Ctrl-C again to stop at once\nsaved step {done}\n" in output
    assert f"to continue: ownloop run --resume {folder}" in output

    rows = [row for row in metric_rows(folder) if row["step"] <= done and "policy_version" in row]
    assert len(rows) == done
    run = ownloop(tmp_path, "--resume", "ended", "--num-steps", str(done + 1))
    status, output, _ = wait_for_end(run, "the run", 200)
    assert status == 0, output
    assert [row for row in metric_rows(folder) if "policy_version" in row][:done] == rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = ownloop(tmp_path, RECIPE, "--name", "whole", *OPTIONS, str(NUM_STEPS))
    status, output, _ = wait_for_end(whole, "the whole run", 500)
    assert status == 0, output
    expected = metric_rows(tmp_path / "runs" / "whole")

    folder = tmp_path / "runs" / "killed"
    chance = random.Random()
    first, second = chance.randrange(3, 8), chance.randrange(10, 17)
    run = ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS, "22")
    wait(run, lambda: complete_checkpoints(folder / "checkpoints"))  # without one nothing can go on
    kill_controller(run, folder, first)

    run = ownloop(tmp_path, "--resume", "killed", "--max-restarts", "0")
    _kill_trainer_in_a_save(run, folder)
    status, output, _ = wait_for_end(run, "the run")
    assert status == 1, output
    assert re.search(r"error: MeshError: trainer: .* died", output), output
    assert f"ownloop run --resume {folder}" in output

    run = ownloop(tmp_path, "--resume", str(folder), "--max-restarts", "3")
    _kill_trainer(run, folder, second)  # it goes on by itself
    wait_for_step(run, folder, second + 2)
    run.send_signal(signal.SIGINT)
    status, output, _ = wait_for_end(run, "the run")
    assert status == 128 + signal.SIGINT, output

    # The configuration that it began with had fewer steps.
    run = ownloop(tmp_path, "--resume", "killed", "--num-steps", str(NUM_STEPS))
    status, output, _ = wait_for_end(run, "the run", 500)
    assert status == 0, output
    assert metric_rows(folder) == expected, f"killed after steps {first} and {second}"
    assert model_hash(folder) == model_hash(tmp_path / "runs" / "whole")
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-00021", "step-00023"]
