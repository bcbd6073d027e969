"""Recorded rollouts under another reward: rewards, advantages and gradients, and training that follows from them."""

import asyncio
import io
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from controller.commands.resume import replayed
from controller.loops import grpo
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import is_timing
from controller.runs.recording import read_recording
from ownloop_doctors.rows import parse_columns, problems_of_rows, read_columns
from ownloop_instruments.one_process import gradient_cosines
from ownloop_instruments.regrade import Graded, graded_now, regrade, regrade_rows, write_regraded
from ownloop_instruments.regrade_command import Regrade, changes
from ownloop_tasks.guess_number import GuessNumber, HiddenNumber
from rl.advantages import group_mean
from rl.protocols import Done, Env
from rl.rollouts.episodes import group_to_data, rollout_groups
from rl.rollouts.rendering import Renderer
from rl.tiny_tasks import EvenWords, even
from rl.types import Group, SamplingParams
from tests.controller.commands.finished_runs import finished_run, in_this_process
from tests.e2e import tiny_recipe
from tests.rl.fakes import ScriptedGenerator, WordRenderer, completion, single_turn
from tests.rl.recordings import recorded_rows
from trainer.engines.contract.reference import ReferencePolicy, importance_sampling


def half_blind(text: str) -> float:
    """A grader with a bug: it takes words of two digits for odd."""
    words = text.split()
    return (
        even(" ".join(word for word in words if len(word) == 2)) * sum(len(w) == 2 for w in words) / max(len(words), 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfBlind(EvenWords):
    """`EvenWords` with the bug."""

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        return [replace(each, score=half_blind) for each in EvenWords.train_problems(self, seed, start, count)]


def _run(config: GRPOConfig, path: Path) -> RunFolder:
    folder = RunFolder(path, config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    folder.flush()
    return folder


def _steps(folder: RunFolder) -> list[dict[str, float]]:
    """The optimizer steps, timings aside."""
    return [{n: v for n, v in row.items() if not is_timing(n)} for row in folder.metrics() if "grad_norm" in row]


def _weights(folder: RunFolder) -> bytes:
    return (folder.path / "model" / "model.safetensors").read_bytes()


def _regraded(config: GRPOConfig, recording: Path, env: Env, out: Path) -> list[Graded]:
    renderer = Renderer(Path(config.model), config.generator.max_model_len)
    graded = graded_now(regrade(read_recording(recording), env, config.seed, renderer, 10.0))
    write_regraded(graded, out)
    return graded


@pytest.mark.vllm
@pytest.mark.usefixtures("in_process")
def test_a_run_on_a_mended_recording_is_the_run_that_had_the_right_grader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path / "model"))
    right = replace(tiny_recipe.recipe(), num_steps=2, evaluate_every=100)
    played = _run(right, tmp_path / "right")
    # What a run with the bug would have recorded of these rollouts, and what the mended grader makes of that.
    broken = _regraded(right, played.rollouts, HalfBlind(), tmp_path / "broken")
    assert changes(broken, right.advantage_function).num_signs > 0
    mended = _regraded(right, tmp_path / "broken", EvenWords(), tmp_path / "mended")
    assert [each.group for each in mended] == [g for step in (1, 2) for g in read_recording(played.rollouts)[step]]
    follows = _run(replayed(right, tmp_path / "mended"), tmp_path / "follows")
    assert _steps(follows) == _steps(played)
    assert _weights(follows) == _weights(played)
    # A run that really had the bug: its first step was sampled by the same weights, and is that of the right grader.
    wrong = replace(right, env=HalfBlind(), num_steps=1)
    buggy = _run(wrong, tmp_path / "wrong")
    assert _steps(buggy) != _steps(played)[:1]
    _regraded(wrong, buggy.rollouts, EvenWords(), tmp_path / "of wrong")
    again = _run(replayed(replace(right, num_steps=1), tmp_path / "of wrong"), tmp_path / "again")
    assert _steps(again) == _steps(played)[:1]


def test_gradients_under_both_rewards_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(tmp_path / "model"))
    config = tiny_recipe.recipe()
    model, said = Path(config.model), ["w4 w5 w6", "w10 w12", "w7 w9", "w2"]
    words = [[int(word[1:]) for word in text.split()] for text in said]
    answers = [replace(completion(text), tokens=(*t,), logprobs=(-1.5,) * len(t), versions=(0,) * len(t))
               for text, t in zip(said, words, strict=True)]  # fmt: skip
    old = tuple(single_turn((1, 2, 3), each, half_blind(each.text)) for each in answers)
    new = tuple(replace(each, reward=even(each.turns[0].completion.text)) for each in old)
    graded = Graded(1, Group(problem_id="p", prompt="p", rollouts=old), new)
    _, told = gradient_cosines(tmp_path / "no checkpoints", config, [graded])
    vectors: list[torch.Tensor] = []
    for group in (graded.before, graded.group):
        reference = ReferencePolicy(model)
        reference.backward(group_to_data(group, config.advantage_function), importance_sampling)
        vectors.append(torch.cat([each.flatten() for each in reference.gradients().values()]))
    tokens = sum(len(each.tokens) for each in answers)
    cosine = torch.cosine_similarity(vectors[0], vectors[1], dim=0).item()
    assert told.split("cosine ")[1].split(",")[0] == f"{cosine:+.4f}"
    norms = [float(text) for text in told.split("norm ")[1].split(" and ")]
    assert norms == pytest.approx([float(each.norm()) / tokens for each in vectors], rel=1e-3)
    assert abs(cosine) < 0.999


class Halved(GuessNumber):
    """Pays half for a right guess."""

    def train_problems(self, seed: int, start: int, count: int) -> list[Any]:
        return [HalvedNumber(**{n: getattr(each, n) for n in HiddenNumber.__slots__}) for each in
                GuessNumber.train_problems(self, seed, start, count)]  # fmt: skip


class HalvedNumber(HiddenNumber):
    """A game that pays half."""

    def start(self) -> Any:
        game: Any = HiddenNumber.start(self)
        reply = game.reply

        def halved(text: str) -> Any:
            said = reply(text)
            return replace(said, reward=said.reward / 2) if isinstance(said, Done) else said

        game.reply = halved
        return game


def _played(env: Env, renderer: Any) -> list[Group]:
    """Games of several turns: each rollout guesses the lowest number first, and one more for each hint."""
    problems = env.train_problems(0, 0, 6)
    generator = ScriptedGenerator(lambda prompt, sample, _: str(10 + (sum(prompt) * 7 + sample * 131) % 490))
    return asyncio.run(rollout_groups(generator, renderer, problems, SamplingParams(max_tokens=4, seed=0), 4))


def _recording(groups: list[Group], path: Path) -> Any:
    folder = RunFolder(path, {})
    for step, start in enumerate(range(0, len(groups), 3), start=1):
        folder.log_rollouts(step, groups[start : start + 3])
    folder.flush()
    return read_recording(folder.rollouts)


def test_games_of_several_turns_are_played_again(tmp_path: Path) -> None:
    env, renderer = GuessNumber(span=300), WordRenderer()
    groups = _played(env, renderer)
    assert {len(rollout.turns) for group in groups for rollout in group.rollouts} >= {4}
    steps = _recording(groups, tmp_path / "run")
    same = graded_now(regrade(steps, env, 0, renderer, 10.0))  # pyright: ignore[reportArgumentType] - a fake
    assert [each.group for each in same] == groups
    assert [each.step for each in same] == [1, 1, 1, 2, 2, 2]
    halved = graded_now(regrade(steps, Halved(span=300), 0, renderer, 10.0))  # pyright: ignore[reportArgumentType]
    assert [each.group.rewards.tolist() for each in halved] == [(g.rewards / 2).tolist() for g in groups]


def test_an_environment_that_would_have_said_something_else_grades_nothing(tmp_path: Path) -> None:
    env, renderer = GuessNumber(span=300), WordRenderer()
    steps: Any = _recording(_played(env, renderer), tmp_path / "run")
    for other, reason in (
        (GuessNumber(span=300, max_turns=2), "ends the episode after turn 2 of 4 recorded ones"),
        (GuessNumber(span=300, max_turns=5), "asks for turn 5; the recorded episode ended after turn 4"),
        (EvenWords(), "none of the first 1280 training problems has its id, and none has its prompt"),
    ):
        with pytest.raises(ValueError, match=reason):
            graded_now(regrade(steps, other, 0, renderer, 10.0))  # type: ignore[arg-type]


def _group(name: str, before: tuple[float, ...], after: tuple[float, ...]) -> Graded:
    rollouts = tuple(single_turn((1,), completion("a"), reward, {f"reward_{name}": 0.0}) for reward in before)
    return Graded(1, Group(problem_id=name, prompt=name, rollouts=rollouts),
                  tuple(replace(r, reward=value) for r, value in zip(rollouts, after, strict=True)))  # fmt: skip


def test_changes_are_those_of_rewards_signals_and_advantages() -> None:
    gains, loses = _group("a", (0.0, 0.0), (1.0, 0.0)), _group("b", (1.0, 0.0), (1.0, 1.0))
    turns = _group("b", (1.0, 0.0), (0.0, 1.0))
    found = changes([gains, loses, turns], group_mean)
    assert (found.num_rollouts, found.num_changed, found.mean_before, found.mean_after) == (6, 4, 2 / 6, 4 / 6)
    assert (found.signal_before, found.signal_after, found.gained, found.lost) == (2, 2, 1, 1)
    was, now = np.array([0, 0, 0.5, -0.5, 0.5, -0.5]), np.array([0.5, -0.5, 0, 0, -0.5, 0.5])
    assert found.num_signs == 6
    assert found.size == pytest.approx(np.linalg.norm(now - was) / np.linalg.norm(was))
    assert (gains.task, turns.task) == ("a", "b")


def contains(solution_str: str, ground_truth: str, extra: float = 0.0) -> float:
    """A reward function as verl calls it."""
    return float(ground_truth in solution_str) + extra


def _graded_rows(file: Path, *named: str) -> list[Graded]:
    columns, said = parse_columns(named)
    rows = read_columns(file, columns, ("prompt", "completion"))
    return graded_now(regrade_rows(rows, problems_of_rows(rows, contains, said), 1.0))


def test_rows_of_another_framework_are_graded_by_a_function(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = [{"input": "1 + 1", "output": said, "gts": "2", "score": old, "step": 4}
            for said, old in (("2", 0.0), ("it is 2", 0.0), ("3", 1.0))]  # fmt: skip
    file = tmp_path / "4.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    named = ("prompt=input", "completion=output", "solution_str=completion", "ground_truth=gts")
    (graded,) = _graded_rows(file, *named, "reward=score")
    assert (graded.step, graded.group.rewards.tolist()) == (4, [1.0, 1.0, 0.0])
    assert graded.before.rewards.tolist() == [0.0, 0.0, 1.0]
    unknown = changes(_graded_rows(file, *named), group_mean)
    assert (math.isnan(unknown.mean_before), unknown.mean_after, unknown.signal_after) == (True, 2 / 3, 1)
    assert Regrade(recorded=str(file), env="test_regrade:contains", columns=(*named, "reward=score"), show=1).run() == 0
    told = capfd.readouterr().out.splitlines()
    assert told[0].startswith("3 rollouts of 1 step, graded in ")
    assert told[2].split() == ["all", "3", "0.333", "0.667", "3", "1", "1", "1", "0", "0", "3", "2.00"]
    assert told[3:] == ["  step 4, 1 + 1: 0 -> 1: '2'"]
    with pytest.raises(ValueError, match="the reward has a parameter 'solution_str', which not every row has"):
        _graded_rows(file, "prompt=input", "completion=output")
    with pytest.raises(ValueError, match=r"4\.jsonl:1 has no column 'completion'; --columns completion=NAME"):
        _graded_rows(file, "prompt=input")
    with pytest.raises(ValueError, match="--columns has 'prompt'; it must be like"):
        _graded_rows(file, "prompt")
    with pytest.raises(ValueError, match="--gradient is for runs"):
        Regrade(recorded=str(file), env="test_regrade:contains", gradient=1).run()


def test_the_command_grades_a_run_and_writes_what_a_replay_trains_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch, tmp_path)
    run = finished_run("a")
    (tmp_path / "blind_words.py").write_text("from test_regrade import HalfBlind\nenv = HalfBlind()\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert Regrade(recorded="a").run() == 0
    table = capfd.readouterr().out.splitlines()[2].split()
    assert (table[1], table[4], table[9]) == ("32", "0", "0"), "its own rewards are those that it had"
    assert Regrade(recorded="a", env="blind_words:env", out=Path("blind"), gradient=2).run() == 0
    told = capfd.readouterr().out
    assert "gradients of step 2 at the weights of checkpoint 1, under the old and the new rewards:" in told
    assert told.splitlines()[-1] == "written to blind; to train on it: ownloop run RECIPE --replay blind"
    before = [row for row in recorded_rows(run) if row["split"] == "train"]
    after = [row for step in (1, 2) for row in pq.read_table(f"blind/step-{step:05}.parquet").to_pylist()]
    kept = ("step", "group", "sample", "problem_id", "turns")
    assert [[row[n] for n in kept] for row in after] == [[row[n] for n in kept] for row in before]
    assert [row["reward"] for row in after] == [half_blind(row["turns"][0]["text"]) for row in before]
    with pytest.raises(ValueError, match="--out is blind, which exists"):
        Regrade(recorded="a", out=Path("blind")).run()
    with pytest.raises(ValueError, match=r"--seed changes the run.s own recipe, and --env is"):
        Regrade(recorded="a", env="blind_words:env", fields=("--seed", "3")).run()
