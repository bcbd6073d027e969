"""The learning rate of `accumulate`, which follows the KL that a step brought about."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from controller.runs.folder import read_metrics
from rl.losses import LossInputs
from tests.docs.loop_runs import run_loop

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("in_one_process")]

# Every step moves the policy less than this, so the rate always rises.
CHANGES: dict[str, Any] = {"kl_target": 1e9, "warmup_steps": 3, "num_steps": 3, "evaluate_every": 3}


def explode(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
    """A loss whose gradient is not finite."""
    return logprobs.sum() * float("nan"), {}


def _rates(run: Path) -> list[float]:
    return [row["learning_rate"] for row in read_metrics(run / "metrics.jsonl") if "learning_rate" in row]


def test_a_skipped_step_leaves_the_rate_as_it_is(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**CHANGES, "num_steps": 2, "learning_rate": 4e-3, "loss_config": {}}
    run_loop("accumulate", tmp_path / "skipped", loss=f"{__name__}:explode", **changes)
    assert _rates(tmp_path / "skipped") == pytest.approx([1e-3, 1e-3])
    run_loop("accumulate", tmp_path / "whole", **changes)
    assert _rates(tmp_path / "whole") == pytest.approx([1e-3, 1.5e-3])


@pytest.mark.slow
def test_a_rate_that_is_restored_is_no_higher_than_the_recipe_s(tmp_path: Path) -> None:
    first: dict[str, Any] = {**CHANGES, "warmup_steps": 0, "checkpoint_every": 1, "learning_rate": 4e-3}
    then: dict[str, Any] = {**first, "learning_rate": 1e-3, "num_steps": 5}
    run_loop("accumulate", tmp_path / "run", **first)
    run_loop("accumulate", tmp_path / "run", resume=True, **then)
    assert _rates(tmp_path / "run") == pytest.approx([4e-3] * 3 + [1e-3] * 2)
