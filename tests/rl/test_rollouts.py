import asyncio
from typing import Any, cast

import numpy as np
import pytest

from rl.advantages import group_mean
from rl.envs.procedural import TextProblem
from rl.rendering import Renderer
from rl.rollouts import group_to_data, rollout_to_datum, sample, score
from rl.types import Group, Rollout, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer, completion

RENDERER = cast(Renderer, WordRenderer())


def _problem(text: str, right: str = "yes") -> TextProblem:
    return TextProblem(id=text, prompt=text, score=lambda answer: float(answer == right))


def _group(*rewards: float) -> Group:
    rollouts = tuple(Rollout(prompt_tokens=(7, 8, 9), completion=completion("ab"), reward=r) for r in rewards)
    return Group(problem_id="p", prompt="p", rollouts=rollouts)


def test_samples_keep_the_order_of_the_problems() -> None:
    generator = ScriptedGenerator(lambda prompt, i, seed: f"{prompt[0]}-{i}-{seed}")
    problems = [_problem("x" * n) for n in range(1, 9)]
    samples = asyncio.run(sample(generator, RENDERER, problems, SamplingParams(max_tokens=4, seed=100), num_samples=3))
    assert [s.problem.id for s in samples] == [p.id for p in problems]
    assert [[c.text for c in s.completions] for s in samples[:2]] == [
        ["1-0-100", "1-1-100", "1-2-100"],
        ["2-0-103", "2-1-103", "2-2-103"],
    ]


def test_a_failing_generator_fails_the_step() -> None:
    def answer(prompt: tuple[int, ...], i: int, seed: int | None) -> str:
        if prompt[0] == 3:
            raise RuntimeError("lost the mesh")
        return "yes"

    problems = [_problem("x" * n) for n in range(1, 9)]
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(sample(ScriptedGenerator(answer), RENDERER, problems, SamplingParams(max_tokens=4), 1))
    assert caught.group_contains(RuntimeError, match="lost the mesh")


def test_scores_are_the_problems_own() -> None:
    generator = ScriptedGenerator(lambda prompt, i, seed: "yes" if i == 1 else "no")
    (samples,) = asyncio.run(sample(generator, RENDERER, [_problem("q")], SamplingParams(max_tokens=4), 3))
    assert score(samples).rewards.tolist() == [0, 1, 0]


def test_a_reward_that_is_not_a_number_names_the_problem() -> None:
    problem = TextProblem(id="broken", prompt="q", score=lambda answer: float("nan"))
    generator = ScriptedGenerator(lambda prompt, i, seed: "a")
    (samples,) = asyncio.run(sample(generator, RENDERER, [problem], SamplingParams(max_tokens=4), 1))
    with pytest.raises(ValueError, match="'broken' is nan"):
        score(samples)


def test_a_datum_scores_each_completion_token_where_it_is_predicted() -> None:
    rollout = Rollout(prompt_tokens=(7, 8, 9), completion=completion("ab"), reward=1.0)
    datum = rollout_to_datum(rollout, advantage=-0.5)
    assert datum.tokens.tolist() == [7, 8, 9, ord("a")]
    inputs: Any = {name: array.tolist() for name, array in datum.loss_inputs.items()}
    assert inputs == {
        "target_tokens": [8, 9, ord("a"), ord("b")],
        "weights": [0, 0, 1, 1],
        "logprobs": [0, 0, -1, -1],
        "advantages": [0, 0, -0.5, -0.5],
    }
    assert datum.num_loss_tokens == 2


def test_a_group_without_signal_trains_nothing() -> None:
    assert group_to_data(_group(0.3, 0.3), group_mean) == []
    data = group_to_data(_group(1.0, 0.0), group_mean)
    assert [float(np.max(d.loss_inputs["advantages"])) for d in data] == [0.5, 0.0]
