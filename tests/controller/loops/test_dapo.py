"""DAPO with a tiny model, in one process: steps are filled up, and evaluation changes nothing of training."""

import asyncio
import dataclasses
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from controller.loops import dapo
from controller.loops.dapo import DAPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import is_timing
from rl.envs.procedural import TextProblem
from rl.tiny_tasks import EvenWords
from tests.e2e import tiny_recipe
from tests.rl.recordings import recorded_rows

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfSolved(EvenWords):
    """Every other problem is solved by any answer, so that its group has no signal."""

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        problems = EvenWords.train_problems(self, seed, start, count)
        return [
            p if number % 2 else replace(p, score=lambda text: 1.0) for number, p in enumerate(problems, start=start)
        ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DAPOConfig:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path_factory.mktemp("tiny") / "model"))
        recipe = tiny_recipe.recipe()
    fields: dict[str, Any] = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    changes: dict[str, Any] = {
        "env": HalfSolved(),
        "num_steps": 3,
        "evaluate_every": 3,
        "max_rounds": 2,
        "overlong_cache": 1,
    }
    return DAPOConfig(**{**fields, **changes})


def _run(config: DAPOConfig, path: Path) -> RunFolder:
    folder = RunFolder(path, config)
    asyncio.run(dapo.train(config, folder, Console(io.StringIO())))
    return folder


def _training(folder: RunFolder) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Metrics of every step but for timings, and the rollouts."""
    rows = [row for row in folder.metrics() if "reward_mean" in row]
    rollouts = recorded_rows(folder.path)
    return (
        [{n: row[n] for n in row if not is_timing(n)} for row in rows],
        [{n: r[n] for n in r if n != "environment_s"} for r in rollouts if r["split"] == "train"],
    )


def test_steps_are_filled_up_and_evaluation_disturbs_nothing(config: DAPOConfig, tmp_path: Path) -> None:
    folder = _run(config, tmp_path / "seldom")
    metrics, rollouts = _training(folder)
    sampled = [int(row["groups_sampled"]) for row in metrics]
    assert all(config.prompts_per_step <= count <= 2 * config.prompts_per_step for count in sampled)
    assert sum(sampled) > 3 * config.prompts_per_step  # some groups of the first round had no signal
    assert all(0 < row["groups_with_signal"] <= config.prompts_per_step for row in metrics)
    problems = config.env.train_problems(config.seed, 0, sum(sampled))  # every step goes on where the last one stopped
    assert [r["problem_id"] for r in rollouts] == [p.id for p in problems for _ in range(config.group_size)]
    assert [row["policy_version"] for row in metrics] == [1, 2, 3]

    often = _run(replace(config, evaluate_every=1, eval_samples=3), tmp_path / "often")
    assert _training(often) == (metrics, rollouts)
    evaluations = [row for row in often.metrics() if "eval_pass_at_3" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2, 3]
    for row in evaluations:
        assert row["eval_pass_at_1"] <= row["eval_pass_at_2"] <= row["eval_pass_at_3"]
        assert row["eval_pass_at_3_low"] <= row["eval_pass_at_3"] <= row["eval_pass_at_3_high"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_rounds": 0}, "max_rounds is 0"),
        ({"overlong_cache": 9}, "cache is 9; it must not exceed max_tokens 8"),
        ({"eval_samples": 0}, "eval_samples is 0"),
        ({"group_size": 1}, "group_size is 1"),
    ],
)
def test_what_cannot_be_is_refused(config: DAPOConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)
