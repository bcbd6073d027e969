"""A run of any loop that is killed and resumed does what it would have done: every step once, with the same numbers."""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from controller.runs.folder import complete_checkpoints
from rl.lora import LoRAConfig
from rl.rollouts.columns import read_groups
from rl.tiny_tasks import EvenWords
from tests.controller.runs.killed_runs import STEPS, killed_after, metrics, rollouts, same_after_kills
from tests.docs.in_process import launch_in_process
from tests.docs.loop_runs import LOOPS, run_loop

pytestmark = pytest.mark.slow

ADAPTER = LoRAConfig(rank=4, train_unembed=False)
RUNS = [
    ("ppo", ADAPTER),
    ("dpo", ADAPTER),
    *((loop, None) for loop in LOOPS if loop not in ("grpo", "grpo_async")),
]
"""`tests/e2e/test_resume.py` has grpo."""


@pytest.fixture(scope="module", autouse=True)
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Trainers and generators are in this process."""
    with pytest.MonkeyPatch.context() as patch:
        launch_in_process(patch, tmp_path_factory.mktemp("cache"))
        yield


@pytest.mark.parametrize(("loop", "lora"), RUNS)
def test_a_resumed_run_equals_one_that_was_left_alone(loop: str, lora: LoRAConfig | None, tmp_path: Path) -> None:
    same_after_kills(loop, tmp_path / "whole", lora=lora)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_a_resumed_grpo_async_trains_once_on_everything(max_staleness: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    changes: dict[str, Any] = {**STEPS, "max_staleness": max_staleness}
    with killed_after(4, whole) as killed:
        run_loop("grpo_async", whole, **changes)
    expected = Counter(problem.id for problem in EvenWords().train_problems(0, 0, 6 * 4))
    for call, run in killed.items():
        newest = complete_checkpoints(run / "checkpoints")[-1]
        waiting = read_groups(file) if (file := newest / "finished_groups.parquet").exists() else []
        assert waiting or max_staleness == 1, "there was nothing that could be lost"
        run_loop("grpo_async", run, resume=True, **changes)
        rows = [row for row in rollouts(run) if row["split"] == "train"]
        assert Counter(row["problem_id"] for row in rows if row["sample"] == 0) == expected, call
        assert [row["policy_version"] for row in metrics(run) if "policy_version" in row] == list(range(1, 7)), call
        assert max(row["staleness_max"] for row in metrics(run) if "staleness_max" in row) <= max_staleness
        for group in waiting:  # what had been sampled is trained on as it was, not sampled again
            turns = [turn for row in rows if row["problem_id"] == group.problem_id for turn in row["turns"]]
            completions = [turn.completion for rollout in group.rollouts for turn in rollout.turns]
            assert [tuple(turn["tokens"]) for turn in turns] == [completion.tokens for completion in completions], call
            assert [tuple(turn["versions"]) for turn in turns] == [c.versions for c in completions], call
