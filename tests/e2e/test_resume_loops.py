"""Runs of the other loops whose controller is killed: resumed, they do what they would have done.

`tests/controller/runs/test_resumed_runs.py` has the same in one process, for every loop and at given moments.
"""

from collections import Counter
from pathlib import Path

import pytest

from controller.runs.folder import complete_checkpoints
from rl.tiny_tasks import EvenWords
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait
from tests.rl.recordings import recorded_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = str(Path(__file__).with_name("tiny_loops.py"))
NUM_STEPS = 16
OPTIONS = ("--checkpoint-every", "4", "--evaluate-every", "6", "--num-steps", str(NUM_STEPS))


def _killed_and_resumed(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "killed"
    run = ownloop(tmp_path, RECIPE, "--name", "killed", *OPTIONS)
    wait(run, lambda: complete_checkpoints(folder / "checkpoints"))  # it is written while the run goes on
    kill_controller(run, folder, 5)
    run = ownloop(tmp_path, "--resume", "killed")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    return folder


@pytest.mark.parametrize("loop", ["dapo", "ppo", "accumulate", "distill"])
def test_a_killed_run_goes_on_to_the_same_metrics(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_LOOP", loop)
    whole = ownloop(tmp_path, RECIPE, "--name", "whole", *OPTIONS)
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output
    expected = tmp_path / "runs" / "whole"
    folder = _killed_and_resumed(tmp_path)
    assert metric_rows(folder) == metric_rows(expected)
    assert model_hash(folder) == model_hash(expected)


def test_a_killed_grpo_async_trains_once_on_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_LOOP", "grpo_async")
    folder = _killed_and_resumed(tmp_path)
    rows = [row for row in recorded_rows(folder) if row["step"] > 0 and row["split"] == "train"]
    expected = Counter(problem.id for problem in EvenWords().train_problems(0, 0, NUM_STEPS * 4))
    assert Counter(row["problem_id"] for row in rows if row["sample"] == 0) == expected
    steps = [row for row in metric_rows(folder) if "policy_version" in row]
    assert [row["policy_version"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert max(row["staleness_max"] for row in steps) <= 2
