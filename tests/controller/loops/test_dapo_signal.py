"""DAPO filters groups by the environment's rewards, and punishes long answers of those that it keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import read_metrics
from controller.runs.recording import RecordedEnv, read_recording
from rl.advantages import has_signal
from rl.algorithms.shaping import unshaped
from rl.envs.procedural import TextProblem
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.docs.loop_runs import run_loop

pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("in_one_process")]

# Every answer is in the cache, so its length alone decides how far it is punished.
CHANGES: dict[str, Any] = {"sampling": SamplingParams(max_tokens=24), "overlong_cache": 24, "max_rounds": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved(EvenWords):
    """Any answer to every problem, or to every second one, is right."""

    every: int = 1

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        problems = EvenWords.train_problems(self, seed, start, count)
        return [
            p if number % self.every else replace(p, score=lambda text: 1.0)
            for number, p in enumerate(problems, start=start)
        ]


def _steps(run: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "seconds_step" in row]


def test_a_punishment_alone_is_no_signal(tmp_path: Path) -> None:
    run_loop("dapo", tmp_path / "run", env=Solved(), **CHANGES)
    groups = [group for groups in read_recording(tmp_path / "run" / "rollouts").values() for group in groups]
    lengths = [{rollout.num_sampled_tokens for rollout in group.rollouts} for group in groups]
    assert any(len(of_group) > 1 for of_group in lengths)  # a punishment would tell them apart
    for row in _steps(tmp_path / "run"):
        assert "grad_norm" not in row
        assert (row["groups_with_signal"], row["reward_mean"]) == (0, 1)


def test_a_replay_keeps_the_groups_that_the_run_kept(tmp_path: Path) -> None:
    run_loop("dapo", tmp_path / "run", env=Solved(every=2), **CHANGES)
    recording = read_recording(tmp_path / "run" / "rollouts")
    steps = _steps(tmp_path / "run")
    for row in steps:
        groups = recording[int(row["step"])]
        with_signal = [group for group in groups if has_signal(unshaped(group).rewards)]
        assert 0 < len(with_signal) < len(groups)
        assert row["groups_with_signal"] == len(with_signal)
        assert row["unshaped_reward"] > row["reward_mean"]
    names = ("grad_norm", "groups_with_signal", "reward_mean", "unshaped_reward")
    assert _replayed("dapo", tmp_path, names, **CHANGES) == [[row[name] for name in names] for row in steps]


def _replayed(loop: str, tmp_path: Path, names: Sequence[str], **changes: Any) -> list[list[float]]:
    env = RecordedEnv(tmp_path / "run" / "rollouts", 4, samples_again=True)
    run_loop(loop, tmp_path / "replay", env=env, **changes)
    return [[row[name] for name in names] for row in _steps(tmp_path / "replay")]


@pytest.mark.stranger("2.C7")
@pytest.mark.parametrize("loop", ["dapo", "accumulate"])
def test_a_loop_that_samples_again_can_be_replayed(loop: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_rounds": 3} if loop == "dapo" else {"tokens_per_step": 300, "kl_target": 1e-3}
    run_loop(loop, tmp_path / "run", env=Solved(every=2), **changes)
    steps = _steps(tmp_path / "run")
    assert max(len(groups) for groups in read_recording(tmp_path / "run" / "rollouts").values()) > 4
    names = [name for name in steps[0] if name.split("_")[0] in ("grad", "loss", "reward", "groups", "kl", "rollout")]
    assert _replayed(loop, tmp_path, names, **changes) == [[row[name] for name in names] for row in steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Huge(EvenWords):
    """Rewards that no critic can learn in float32."""

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        return [replace(p, score=lambda text: 1e37) for p in EvenWords.train_problems(self, seed, start, count)]


@pytest.mark.stranger("2.B5")
def test_a_critic_whose_updates_are_skipped_is_counted_and_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingStoppedError, match="gradient was not finite 3 steps in a row"):
        run_loop("ppo", tmp_path / "run", env=Huge(), num_steps=8)
    steps = _steps(tmp_path / "run")
    assert all(row["critic_skipped"] > 0 and not math.isfinite(row["critic_grad_norm"]) for row in steps)
    assert len(steps) == 3
