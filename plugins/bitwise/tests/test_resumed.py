"""Runs in processes of their own that are killed and resumed: in bfloat16 and on two replicas, equal to the digit."""

from pathlib import Path

import pytest

from tests.e2e.cli_runs import metric_rows
from tests.e2e.killed_loops import same_as_whole

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = str(Path(__file__).with_name("tiny_bitwise.py"))


@pytest.mark.parametrize("loop", ["grpo", "ppo"])
def test_a_killed_run_goes_on_to_the_same_digits(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grpo` with an adapter; `ppo` with a critic, a frozen reference and minibatches."""
    monkeypatch.setenv("OWNLOOP_TINY_LOOP", loop)
    same_as_whole(tmp_path, RECIPE)
    steps = [row for row in metric_rows(tmp_path / "runs" / "killed") if "grad_norm" in row]
    assert [row["logprob_mismatch_max"] for row in steps] == [0.0] * len(steps)
    assert len(steps) > 8
