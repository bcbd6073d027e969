"""Every step of `sft` and `dpo` trains, the last one included."""

from pathlib import Path

import pytest

from controller.runs.folder import read_metrics
from tests.docs.loop_runs import run_loop

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("in_one_process")]


@pytest.mark.parametrize(("loop", "rates"), [("sft", (1.0, 0.75, 0.25)), ("dpo", (1.0, 2 / 3, 1 / 3))])
def test_the_schedule_ends_after_the_last_step(loop: str, rates: tuple[float, ...], tmp_path: Path) -> None:
    for num_steps, expected in ((3, rates), (1, (1.0,))):
        run = tmp_path / f"{num_steps} steps"
        run_loop(loop, run, num_steps=num_steps, learning_rate=1e-3, warmup_steps=0)
        rows = [row for row in read_metrics(run / "metrics.jsonl") if "learning_rate" in row]
        assert [row["learning_rate"] / 1e-3 for row in rows] == pytest.approx(expected)
