"""Runs of the other loops whose controller is killed: resumed, they do what they would have done.

`tests/controller/runs/test_resumed_runs.py` has the same in one process, for every loop and at given moments.
"""

from collections import Counter
from pathlib import Path

import pytest

from rl.tiny_tasks import EvenWords
from tests.e2e.cli_runs import metric_rows
from tests.e2e.killed_loops import NUM_STEPS, killed_and_resumed, same_as_whole
from tests.rl.recordings import recorded_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = str(Path(__file__).with_name("tiny_loops.py"))


@pytest.mark.parametrize("loop", ["dapo", "ppo", "accumulate"])
def test_a_killed_run_goes_on_to_the_same_metrics(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_LOOP", loop)
    same_as_whole(tmp_path, RECIPE)


def test_a_killed_grpo_async_trains_once_on_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_LOOP", "grpo_async")
    folder = killed_and_resumed(tmp_path, RECIPE)
    rows = [row for row in recorded_rows(folder) if row["step"] > 0 and row["split"] == "train"]
    expected = Counter(problem.id for problem in EvenWords().train_problems(0, 0, NUM_STEPS * 4))
    assert Counter(row["problem_id"] for row in rows if row["sample"] == 0) == expected
    steps = [row for row in metric_rows(folder) if "policy_version" in row]
    assert [row["policy_version"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert max(row["staleness_max"] for row in steps) <= 2
