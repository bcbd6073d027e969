"""The asynchronous loop with a tiny model, in one process: on policy it is `grpo`, otherwise it keeps its bound."""

import asyncio
import dataclasses
import hashlib
import io
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controller.commands.resume import replayed
from controller.loops import grpo, grpo_async
from controller.loops.grpo import GRPOConfig
from controller.loops.grpo_async import GRPOAsyncConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder, read_metrics
from controller.runs.metric_rows import is_timing
from rl.protocols import Env
from rl.tiny_tasks import EvenWords, even
from tests.e2e import tiny_recipe
from tests.rl.recordings import recorded_rows
from tests.waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]
PROMPTS_PER_STEP = 4
MAX_STALENESS = 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path_factory.mktemp("tiny") / "model"))
        return tiny_recipe.recipe()


def _asynchronous(config: GRPOConfig, max_staleness: int, **changes: Any) -> GRPOAsyncConfig:
    fields: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return GRPOAsyncConfig(**{**fields, **changes}, max_staleness=max_staleness)


def _values(folder: RunFolder) -> list[dict[str, float]]:
    """The metrics of every step, but for timings and what only one of the loops has."""
    return [
        {name: row[name] for name in row if not is_timing(name) and not name.startswith("staleness_")}
        for row in folder.metrics()
    ]


def _rollouts(folder: RunFolder) -> list[dict[str, Any]]:
    rows = recorded_rows(folder.path)
    return [{name: value for name, value in row.items() if name not in ("environment_s", "number")} for row in rows]


def _weights(folder: RunFolder) -> str:
    (file,) = (folder.path / "model").glob("*.safetensors")
    return hashlib.blake2b(file.read_bytes()).hexdigest()


def _run(config: GRPOConfig, path: Path) -> RunFolder:
    folder = RunFolder(path, config)
    _run_in(folder, config)
    return folder


def _run_in(folder: RunFolder, config: GRPOConfig) -> None:
    console = Console(io.StringIO())
    if isinstance(config, GRPOAsyncConfig):
        asyncio.run(grpo_async.train(config, folder, console))
    else:
        asyncio.run(grpo.train(config, folder, console))


def _train_rows(folder: RunFolder) -> list[dict[str, Any]]:
    return [row for row in _rollouts(folder) if row["split"] == "train"]


@pytest.fixture(scope="module")
def on_policy(recipe: GRPOConfig, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of `grpo`."""
    return _run(recipe, tmp_path_factory.mktemp("grpo") / "run")


def test_without_staleness_it_is_grpo(recipe: GRPOConfig, on_policy: RunFolder, tmp_path: Path) -> None:
    folder = _run(_asynchronous(recipe, 0), tmp_path / "run")
    assert _rollouts(folder) == _rollouts(on_policy)
    assert _values(folder) == _values(on_policy)
    assert _weights(folder) == _weights(on_policy)
    assert [row["staleness_max"] for row in folder.metrics() if "staleness_max" in row] == [0] * recipe.num_steps


def _assert_replayed(config: GRPOConfig, recorded: RunFolder, path: Path) -> None:
    """The trainer's side of a loop, fed with what a run recorded, does what that run did."""
    folder = _run(replayed(config, recorded.rollouts), path)
    assert [file.name for file in folder.logs.glob("generator*")] == []
    assert _train_rows(folder) == _train_rows(recorded)
    expected = [row for row in _values(recorded) if "grad_norm" in row]
    assert _values(folder) == expected
    assert len(expected) == config.num_steps
    assert _weights(folder) == _weights(recorded)


def test_a_recording_replays_to_the_same_gradients(recipe: GRPOConfig, on_policy: RunFolder, tmp_path: Path) -> None:
    _assert_replayed(recipe, on_policy, tmp_path / "run")
    with pytest.raises(ValueError, match=r"num_steps is 7; the recording .* has 6 steps"):
        replayed(replace(recipe, num_steps=7), on_policy.rollouts)


def test_a_recording_of_another_tokenizer_is_refused(recipe: GRPOConfig, on_policy: RunFolder, tmp_path: Path) -> None:
    other = shutil.copytree(recipe.model, tmp_path / "model")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"w', '"v'))
    with pytest.raises(ValueError, match=r"is of another tokenizer than that of .*: what was 'w.* is 'v.* to it"):
        replayed(replace(recipe, model=str(other)), on_policy.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWords(EvenWords):
    """Every seventh problem's answers have no score before the run has done the step before the last that may take it.

    They are for a run with MAX_STALENESS and groups of PROMPTS_PER_STEP problems a step.
    """

    run: str = ""
    """The folder of the run; without one no score waits."""

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        problems = EvenWords.train_problems(self, seed, start, count)
        return [
            replace(problem, score=partial(_score_after, self.run, _step_before_the_last(number)))
            if self.run and number % 7 == 0
            else problem
            for number, problem in enumerate(problems, start)
        ]


def _step_before_the_last(number: int) -> int:
    started = max(1, number // PROMPTS_PER_STEP + 1 - MAX_STALENESS)
    return started + MAX_STALENESS - 1


def _score_after(run: str, step: int, completion: str) -> float:
    metrics = Path(run) / "metrics.jsonl"
    wait_until(lambda: any(row["step"] == step and "staleness_max" in row for row in read_metrics(metrics)), f"{step=}")
    return even(completion)


def test_rollouts_run_ahead_as_far_as_the_bound_and_no_further(recipe: GRPOConfig, tmp_path: Path) -> None:
    env: Env = SlowWords(run=str(tmp_path / "run"))
    changes: dict[str, Any] = {"num_steps": 12, "evaluate_every": 100, "prompts_per_step": PROMPTS_PER_STEP}
    config = _asynchronous(recipe, MAX_STALENESS, env=env, env_time_limit_s=LIMIT_S, **changes)
    folder = _run(config, tmp_path / "run")
    steps = [row for row in folder.metrics() if "staleness_max" in row]
    assert [row["policy_version"] for row in steps] == list(range(1, 13))
    assert max(row["staleness_max"] for row in steps) == 2
    assert all(0 <= row["staleness_mean"] <= row["staleness_max"] for row in steps)

    rows = _train_rows(folder)
    versions = {row["step"]: set[int]() for row in rows}
    for row in rows:
        versions[row["step"]] |= {version for turn in row["turns"] for version in turn["versions"]}
    for row in steps:  # what the tokens say is what the metrics say: before step s there are s - 1 versions
        assert row["step"] - 1 - min(versions[int(row["step"])]) == row["staleness_max"]
    expected = [problem.id for problem in env.train_problems(recipe.seed, 0, 48)]
    assert sorted(row["problem_id"] for row in rows if row["sample"] == 0) == sorted(expected)

    _assert_replayed(config, folder, tmp_path / "replayed")


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualWords(EvenWords):
    """Every answer is as good as any other."""

    reward: float

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        problems = EvenWords.train_problems(self, seed, start, count)
        return [replace(problem, score=lambda _: self.reward) for problem in problems]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [None, 2])
def test_a_solved_run_is_evaluated_and_exported(recipe: GRPOConfig, max_staleness: int | None, tmp_path: Path) -> None:
    config = replace(recipe, env=EqualWords(reward=1.0), num_steps=100, evaluate_every=100)
    if max_staleness is not None:
        config = _asynchronous(config, max_staleness)
    folder = RunFolder(tmp_path / "run", config)
    _run_in(folder, config)
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, *range(1, 11), 10]
    assert ["eval_reward" in row for row in rows] == [True, *[False] * 10, True]
    assert [path.name for path in folder.complete_checkpoints()] == ["step-00010"]
    assert list((folder.path / "model").glob("*.safetensors"))


def test_a_staleness_below_zero_is_refused(recipe: GRPOConfig) -> None:
    with pytest.raises(ValueError, match="max_staleness is -1"):
        _asynchronous(recipe, -1)
