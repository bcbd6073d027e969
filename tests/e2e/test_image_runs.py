"""A run with images is killed and continues as if it had been left alone; it is replayed; what it exports is served.

Covers: configs/guess_colour_tinyvl_cpu.py
"""

from pathlib import Path

import pytest

from controller.runs.folder import complete_checkpoints
from generator.image_prompts import FOLDER
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait
from tests.waiting import wait_for_end

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="torchvision for the CPU is not installed"),
]
RECIPE = str(Path(__file__).with_name("tiny_images.py"))


def finish(tmp_path: Path, *arguments: str) -> None:
    status, output, _ = wait_for_end(ownloop(tmp_path, *arguments), "the run", 400)
    assert status == 0, output


def versions(run: Path) -> list[float]:
    return [row["policy_version"] for row in metric_rows(run) if "policy_version" in row]


def test_a_killed_run_continues_and_is_replayed(tmp_path: Path) -> None:
    finish(tmp_path, RECIPE, "--name", "whole")
    whole, killed, replayed = (tmp_path / "runs" / name for name in ("whole", "killed", "replayed"))
    run = ownloop(tmp_path, RECIPE, "--name", "killed")
    wait(run, lambda: complete_checkpoints(killed / "checkpoints"))
    kill_controller(run, killed, 3)
    finish(tmp_path, "--resume", "killed")
    assert metric_rows(killed) == metric_rows(whole)
    assert versions(whole) == [1, 2, 3, 4, 5]
    finish(tmp_path, RECIPE, "--name", "replayed", "--replay", str(whole))
    assert model_hash(whole) == model_hash(killed) == model_hash(replayed)
