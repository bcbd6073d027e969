"""Runs of `grpo_async` that are repeated in the order of their events, with equal digits."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from controller.processes.errors import TrainingStoppedError
from controller.runs.folder import RunFolder, complete_checkpoints
from generator.engine_part import recorded_schedule
from ownloop_bitwise.draws import key_of
from ownloop_bitwise.schedule import Planned, ScheduledGenerator
from plugins.bitwise.tests import repeatable
from rl.protocols import Generator
from rl.rollouts.columns import read_groups
from rl.rollouts.episodes import all_results
from rl.types import Completion, Group, Rollout, SamplingParams, Turn
from tests.e2e.cli_runs import kill_controller, metric_rows, model_hash, ownloop, wait

NUM_STEPS = 10


class Words:
    """A generator whose token is a function of seed, position and version, and whose pulls wait for nothing."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[tuple[int, int, int]] = []

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Any = None
    ) -> list[Completion]:
        assert sampling.seed is not None
        assert num_samples == 1
        begins, version = len(prompt_tokens), self.version
        self.asked.append((sampling.seed, begins, version))
        await asyncio.sleep(0.001)
        assert self.version == version
        places = range(begins, begins + sampling.max_tokens)
        return [completion([word(sampling.seed, place, version) for place in places], [version] * len(places))]

    async def pull_model_state_dict(self, version: int, **_: Any) -> None:
        self.version = version

    async def drop_policy(self, policy: Any) -> None: ...


def word(seed: int, place: int, version: int) -> int:
    return key_of(seed, 1000 * place + version) % 50


def completion(tokens: Sequence[int], versions: Sequence[int]) -> Completion:
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(float(np.float32(-token / 7)) for token in tokens),
        versions=tuple(versions),
        text="",
        finish_reason="length",
        temperature=1.0,
    )


def planned(seed: int, versions: Sequence[int]) -> Planned:
    tokens = [word(seed, 2 + place, version) for place, version in enumerate(versions)]
    return Planned(f"seed {seed}", (1, 2), completion(tokens, versions))


PLAN = {seed: planned(seed, versions) for seed, versions in {10: [0, 0, 1, 1, 1], 11: [0, 2], 12: [1]}.items()}


async def repeat(plan: dict[int, Planned], seeds: Sequence[int], *, patience_s: float = 10) -> list[Completion]:
    """The completions of these seeds, while versions 0 to 2 are pulled as fast as the schedule lets them."""
    inner = Words()
    generator: Generator = ScheduledGenerator(inner, plan, patience_s)
    sampling = SamplingParams(max_tokens=9)

    async def pull() -> list[Completion]:
        for version in range(3):
            await generator.pull_model_state_dict(version, mode="inflight")
        return []

    running = [generator.generate([1, 2], replace(sampling, seed=seed)) for seed in seeds]
    found = [each for completions in await all_results([pull(), *running]) for each in completions]
    assert sorted(inner.asked) == [(10, 2, 0), (10, 4, 1), (11, 2, 0), (11, 3, 2), (12, 2, 1)]
    return found


def test_each_token_is_sampled_under_its_version() -> None:
    assert asyncio.run(repeat(PLAN, [12, 11, 10])) == [PLAN[seed].completion for seed in (12, 11, 10)]


def test_another_token_and_a_request_that_does_not_come_end_the_run() -> None:
    of_10 = PLAN[10].completion
    changed = replace(of_10, logprobs=(*of_10.logprobs[:4], np.nextafter(of_10.logprobs[4], np.float32(-9))))
    with pytest.raises(TrainingStoppedError, match=r"seed 10 differs from the recorded run at token 4: "):
        asyncio.run(repeat({**PLAN, 10: replace(PLAN[10], completion=changed)}, [10, 11, 12]))
    with pytest.raises(TrainingStoppedError, match=r"seed 12 was sampled by version 1 .* nobody asks for it"):
        asyncio.run(repeat(PLAN, [10, 11], patience_s=0.05))


def test_runs_that_cannot_be_repeated_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path / "model"))
    config = replace(repeatable.recipe(), schedule=tmp_path / "run", num_steps=1, prompts_per_step=1)
    with pytest.raises(ValueError, match=r"schedule is .*, and numerics is ''; it must be 'bitwise'"):
        recorded_schedule(replace(config, numerics=""))
    with pytest.raises(ValueError, match="not the folder of a finished run"):
        recorded_schedule(config)
    folder = RunFolder(tmp_path / "run", replace(config, schedule=None))
    folder.mark_finished()
    rollout = Rollout(turns=(Turn(prompt_tokens=(1, 2), completion=PLAN[12].completion),), reward=0.0)
    group = Group(problem_id="a", prompt="", rollouts=(rollout,), failures=("it hung",), number=3)
    unnumbered = replace(group, failures=(), number=None)
    for broken, why in ((group, "rollouts of step 1 failed"), (unnumbered, "no numbers")):
        folder.log_rollouts(1, [broken])
        folder.flush()
        with pytest.raises(ValueError, match=why):
            recorded_schedule(config)
        (folder.rollouts / "step-00001.parquet").unlink()
    folder.log_rollouts(1, [replace(group, failures=())])
    folder.close()
    schedule = recorded_schedule(config)
    assert schedule is not None
    assert schedule.order == {1: [3]}
    with pytest.raises(ValueError, match=r"where learning_rate was 0.003, and it is 0.1; it must be the same"):
        recorded_schedule(replace(config, learning_rate=0.1))
    (tmp_path / "run" / "parent.json").write_text("{}")
    with pytest.raises(ValueError, match="a fork"):
        recorded_schedule(config)


def finished(tmp_path: Path, *arguments: str) -> None:
    process = ownloop(tmp_path, *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_that_was_killed_twice_is_repeated_to_the_digit(tmp_path: Path) -> None:
    recipe = str(Path(__file__).with_name("repeatable.py"))
    folder, repeated = tmp_path / "runs" / "killed", tmp_path / "runs" / "repeated"
    run = ownloop(tmp_path, recipe, "--name", "killed", "--num-steps", str(NUM_STEPS))
    for step in (4, 7):
        wait(run, lambda: len(complete_checkpoints(folder / "checkpoints")))
        kill_controller(run, folder, step)
        run = ownloop(tmp_path, "--resume", "killed")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    groups = [group for file in sorted((folder / "rollouts").glob("step-*")) for group in read_groups(file)]
    spans = [set(turn.completion.versions) for group in groups for each in group.rollouts for turn in each.turns]
    assert any(len(versions) > 1 for versions in spans)  # some were sampled across a pull
    finished(tmp_path, recipe, "--name", "repeated", "--num-steps", str(NUM_STEPS), "--schedule", str(folder))
    assert metric_rows(repeated) == metric_rows(folder)
    assert model_hash(repeated) == model_hash(folder)
    for file in sorted((folder / "rollouts").glob("*.parquet")):
        ours, theirs = (
            pq.read_table(each / "rollouts" / file.name).drop(["environment_s"]) for each in (repeated, folder)
        )
        assert ours.equals(theirs)
