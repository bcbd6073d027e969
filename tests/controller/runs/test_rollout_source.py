"""The rollouts of a run: the same problems and seeds however they are asked for, and a recording in their place."""

import asyncio
import io
import json
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from controller.handles.offline import OfflineGenerator
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import HeldOut
from controller.runs.recording import RecordedEnv
from controller.runs.rollout_source import RolloutSource
from controller.runs.training_run import Run
from generator.config import GeneratorConfig
from rl.envs.jsonl import JsonlReward
from rl.envs.procedural import TextProblem
from rl.rollouts.episodes import step_seed
from rl.tiny_models import tiny_llama
from rl.tiny_tasks import EvenWords
from rl.types import MAX_RUN_SEED, Group, SamplingParams
from tests.rl.fakes import ScriptedGenerator
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig

NUM_SAMPLES = 2


@pytest.fixture
def config(tmp_path: Path) -> GRPOConfig:
    return GRPOConfig(
        model=str(tiny_llama(tmp_path / "model")),
        env=EvenWords(),
        trainer=TrainerConfig(),
        generator=GeneratorConfig(max_model_len=64),
        sampling=SamplingParams(max_tokens=8),
        num_steps=3,
        prompts_per_step=2,
        group_size=NUM_SAMPLES,
        learning_rate=1e-3,
    )


def _source(config: GRPOConfig) -> RolloutSource:
    return RolloutSource(config, lambda _: None)


def _generator() -> ScriptedGenerator:
    """Its answers depend on the prompt, the sample and the seed."""
    return ScriptedGenerator(lambda prompt, sample, seed: f"w{(sum(prompt) + sample + (seed or 0)) % 64}")


def _step(source: RolloutSource, step: int) -> list[Group]:
    return asyncio.run(source.sample(_generator(), step, NUM_SAMPLES))


def test_a_group_is_the_same_alone_and_within_its_step(config: GRPOConfig) -> None:
    source = _source(config)
    alone = [asyncio.run(source.sample_group(_generator(), number, NUM_SAMPLES)) for number in (2, 3)]
    assert alone == _step(source, 2)


def test_problems_are_the_same_however_many_are_asked_for(config: GRPOConfig) -> None:
    source = _source(config)
    together = asyncio.run(source.sample_problems(_generator(), 3, 3, NUM_SAMPLES))
    apart = [asyncio.run(source.sample_problems(_generator(), start, 1, NUM_SAMPLES)) for start in (3, 4, 5)]
    assert together == [group for groups in apart for group in groups]


class Lines(EvenWords):
    """An environment whose answers are lines."""

    @property
    def stop(self) -> tuple[str, ...]:
        """The end of a line, and of a paragraph."""
        return ("\n", "\n\n")


def test_stop_strings_of_environment_and_recipe_end_answers(config: GRPOConfig) -> None:
    stopping = replace(config, env=Lines(), sampling=SamplingParams(max_tokens=8, stop=("END", "\n")))
    source, generator = _source(stopping), _generator()
    asyncio.run(source.sample(generator, 1, NUM_SAMPLES))
    asyncio.run(source.evaluate(generator))
    assert {sampling.stop for _, sampling, _ in generator.calls} == {("\n", "\n\n", "END")}


class Points(EvenWords):
    """An environment that gives up to five points."""

    best_reward = 5.0

    def eval_problems(self, count: int) -> list[TextProblem]:
        """One point for any answer, and five for a second one."""
        points = {"0": 1.0, "1": 5.0}
        return [replace(each, score=points.__getitem__) for each in EvenWords.eval_problems(self, count)]


def test_an_answer_is_right_from_the_environments_best_reward_on(config: GRPOConfig) -> None:
    generator = ScriptedGenerator(lambda prompt, sample, seed: f"{sample}")
    evaluation = asyncio.run(_source(replace(config, env=Points(), eval_samples=2)).evaluate(generator))
    means = {name: interval.mean for name, interval in evaluation.intervals.items()}
    assert means == {"reward": 3.0, "pass_at_1": 0.5, "pass_at_2": 1.0, "majority_at_2": 3.0}


def test_further_held_out_sets_have_their_own_sampling(config: GRPOConfig) -> None:
    points = HeldOut(env=Points(), num_eval=3, samples=2, sampling=SamplingParams(max_tokens=5, temperature=0.5))
    source = _source(
        replace(config, num_eval=4, held_out={"points": points, "lines": HeldOut(env=Lines(), num_eval=2)})
    )
    generator = ScriptedGenerator(lambda prompt, sample, seed: f"{sample}")
    evaluation = asyncio.run(source.evaluate(generator))
    assert {name: len(each.groups) for name, each in evaluation.sets.items()} == {"": 4, "points_": 3, "lines_": 2}
    assert evaluation.others["points"].pass_at(2).mean == 1.0  # of its own best reward, 5
    asked = [(sampling.max_tokens, sampling.temperature, sampling.stop, n) for _, sampling, n in generator.calls]
    wanted = [(8, 0.0, (), 1)] * 4 + [(5, 0.5, (), 2)] * 3 + [(8, 0.0, ("\n", "\n\n"), 1)] * 2
    assert asked == wanted


def test_a_held_out_set_is_checked_like_the_recipe(config: GRPOConfig) -> None:
    with pytest.raises(ValueError, match=r"held_out has 'a-b'; a name must have letters"):
        replace(config, held_out={"a-b": HeldOut(env=Lines())})
    with pytest.raises(ValueError, match=r"HeldOut.samples is 0"):
        HeldOut(env=Lines(), samples=0)
    cut = HeldOut(env=Lines(), samples=2, sampling=SamplingParams(max_tokens=8, top_p=0.9))
    assert replace(config, held_out={"lines": cut}).generator_config.kept_sets
    long = HeldOut(env=Lines(), sampling=SamplingParams(max_tokens=64))
    with pytest.raises(ValueError, match=r"max_tokens 64 the context of 64 tokens .generator.max_model_len"):
        _source(replace(config, held_out={"lines": long}))


@pytest.mark.parametrize("seed", [-1, 20260101])
def test_a_seed_that_samplers_cannot_take_is_refused(config: GRPOConfig, seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed is {seed}"):
        replace(config, seed=seed)
    largest = step_seed(MAX_RUN_SEED, 2**20 - 1) + 2**20 - 1
    SamplingParams(max_tokens=1, seed=largest)
    torch.Generator().manual_seed(largest)


def test_a_replay_samples_nothing(config: GRPOConfig, tmp_path: Path) -> None:
    played, folder = _source(config), RunFolder(tmp_path / "run", {})
    for step in (1, 2, 3):
        folder.log_rollouts(step, _step(played, step))
    folder.flush()
    recording = RecordedEnv(folder.rollouts, config.prompts_per_step)
    source, generator = _source(replace(config, env=recording)), OfflineGenerator()
    for step in (1, 2, 3):
        expected = _step(played, step)
        assert asyncio.run(source.sample(generator, step, NUM_SAMPLES)) == expected
        assert asyncio.run(source.sample_problems(generator, 2 * step - 2, 2, NUM_SAMPLES)) == expected
        alone = [asyncio.run(source.sample_group(generator, 2 * step - 2 + i, NUM_SAMPLES)) for i in range(2)]
        assert alone == expected


class WaitingWords(EvenWords):
    """Scores no answer before it may, and allows itself 0.05 s."""

    call_time_limit_s = 0.05
    may_score = threading.Event()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """As `EvenWords`, but for the scores."""
        return [replace(problem, score=self._score) for problem in EvenWords.train_problems(self, seed, start, count)]

    def eval_problems(self, count: int) -> list[TextProblem]:
        """As `EvenWords`, but for the scores."""
        return [replace(problem, score=self._score) for problem in EvenWords.eval_problems(self, count)]

    def _score(self, answer: str) -> float:
        assert self.may_score.wait(LIMIT_S)
        return float(len(answer))


def test_the_environments_time_limit_holds_by_default(config: GRPOConfig) -> None:
    config = replace(config, num_eval=1, env=WaitingWords())
    group, _ = _step(_source(config), 1)
    assert all(": it did not answer within 0.05 s" in failure for failure in group.failures)
    assert len(group.failures) == 2
    (group,) = asyncio.run(_source(config).evaluate(_generator())).groups
    assert (len(group.rollouts), len(group.failures)) == (0, 1)
    WaitingWords.may_score.set()
    patient = _source(replace(config, env_time_limit_s=LIMIT_S))
    assert [len(group.rollouts) for group in _step(patient, 1)] == [2, 2]
    (group,) = asyncio.run(patient.evaluate(_generator())).groups
    assert len(group.rollouts) == 1


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_limit_that_is_none_is_refused(config: GRPOConfig, limit: float) -> None:
    with pytest.raises(ValueError, match="env_time_limit_s is "):
        replace(config, env_time_limit_s=limit)


@pytest.mark.stranger("C11")
def test_a_resumed_run_has_the_prompts_of_its_first_day(config: GRPOConfig, tmp_path: Path) -> None:
    template = "{{ strftime_now('w%d w%H') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    (Path(config.model) / "chat_template.jinja").write_text(template)
    folder = RunFolder(tmp_path / "run", config, began=datetime(2024, 3, 15, 13))
    folder.close()
    run = Run(config, RunFolder(tmp_path / "run", config, resume=True), Console(io.StringIO()))
    source = RolloutSource(config, lambda _: None, run.began)
    assert source.renderer.encode([{"role": "user", "content": "w5"}]) == (15, 13, 5)


def test_routes_are_asked_of_the_generator(config: GRPOConfig) -> None:
    config = replace(config, routes="replay")
    assert config.generator_config.routes
    assert not replace(config, routes="off").generator_config.routes
    with pytest.raises(ValueError, match="the engine 'fsdp2' replays no routes"):
        replace(config, trainer=TrainerConfig(engine="fsdp2"))
    with pytest.raises(ValueError, match="is no mixture of experts"):
        replace(config.generator_config, model=Path(config.model)).check_model()


@pytest.mark.stranger("2.F7")
@pytest.mark.parametrize("prompt", ["number {}", [{"role": "user", "content": "number {}"}]])
@pytest.mark.parametrize("has_template", [True, False])
def test_text_for_a_model_with_a_chat_template_is_warned_of(
    prompt: Any, has_template: bool, config: GRPOConfig, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    if has_template:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        (Path(config.model) / "chat_template.jinja").write_text(template)
    rows = [json.dumps({"prompt": prompt}).replace("{}", str(number)) for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    env = JsonlReward(file=tmp_path / "rows.jsonl", reward="rl.envs.jsonl:no_reward")
    if has_template or isinstance(prompt, str):
        _source(replace(config, env=env, num_eval=1))
    assert any("chat template" in str(w.message) for w in recwarn) == (has_template and isinstance(prompt, str))
