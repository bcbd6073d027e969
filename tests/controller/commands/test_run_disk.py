"""A disk that is full or slow, as a user sees it.

Covers: controller/commands/cli.py
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from controller.runs.folder import read_metrics
from rl.rollouts.columns import read_groups
from tests.controller.commands.test_cli import ROOT, command, ownloop
from tests.waiting import wait_for_end, wait_until

RECIPE = Path(__file__).with_name("recording_recipe.py")


@pytest.mark.seconds
def test_a_full_disk_ends_the_run_in_order(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--name", "a", "--full-after", "3")
    run = tmp_path / "runs" / "a"
    assert result.returncode == 1
    assert (
        f"error: RecordingError: {run}/rollouts/step-00004.parquet cannot be written: File too large" in result.stderr
    )
    assert "Traceback" not in result.stderr
    files = sorted(path.name for path in (run / "rollouts").iterdir())
    assert files == [f"step-{step:05d}.parquet" for step in (1, 2, 3)]  # no half file, not even a hidden one
    assert all(len(read_groups(run / "rollouts" / name)) == 1 for name in files)
    last = max(row["step"] for row in read_metrics(run / "metrics.jsonl"))
    assert 4 <= last <= 8  # the loop did not go on for ever


@pytest.mark.seconds
def test_the_last_step_of_all_may_be_the_one_that_does_not_fit(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "run", str(RECIPE), "--name", "a", "--full-after", "3", "--num-steps", "4")
    assert result.returncode == 1
    assert "step-00004.parquet cannot be written: File too large" in result.stderr


@pytest.mark.seconds
def test_a_run_that_is_stopped_has_its_last_step_on_disk(tmp_path: Path) -> None:
    arguments = command("run", str(RECIPE), "--name", "a", "--stopped")
    run, env = tmp_path / "runs" / "a", {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "recorded").exists, "the first step")
        assert not (run / "rollouts" / "step-00001.parquet").exists()
        process.send_signal(signal.SIGINT)
        status, _, errors = wait_for_end(process, "the run")
    assert status == 130, errors
    assert len(read_groups(run / "rollouts" / "step-00001.parquet")) == 1
