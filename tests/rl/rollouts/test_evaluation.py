import asyncio
import contextvars
import itertools
import math
import tracemalloc
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.envs.procedural import TextProblem
from rl.rollouts.episodes import step_seed
from rl.rollouts.evaluation import Evaluation, Interval, bootstrap, eval_sampling, evaluate
from rl.rollouts.rendering import Renderer
from rl.system.timeline import show_progress_with
from rl.types import Group, SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer, completion, single_turn


def _evaluate(num_right: int) -> Evaluation:
    generator = ScriptedGenerator(lambda prompt, i, seed: "yes" if prompt[0] <= num_right else "no")
    problems = [TextProblem(id=str(n), prompt="x" * n, score=lambda a: float(a == "yes")) for n in range(1, 101)]
    renderer = cast(Renderer, WordRenderer())
    return asyncio.run(evaluate(generator, renderer, problems, SamplingParams(max_tokens=1, temperature=0)))


def test_evaluation_is_the_mean_over_problems() -> None:
    evaluation = _evaluate(30)
    assert evaluation.reward.mean == pytest.approx(0.3)
    assert evaluation.reward.low < 0.3 < evaluation.reward.high


@pytest.mark.parametrize(
    ("answers", "majority"),
    [
        (["7", "8.", "8", "9"], 1.0),  # a full stop is no other answer
        (["7", "8", "7", "9"], 0.0),
        (["7", "8", "8", "7"], 0.5),  # as common
        (["<think>7 or 8</think>8", "8", "7", "9"], 1.0),  # thoughts do not count
    ],
)
def test_the_majority_answers_once_for_each_problem(answers: list[str], majority: float) -> None:
    generator = ScriptedGenerator(lambda prompt, i, seed: answers[i])
    problems = [TextProblem(id=str(n), prompt="x", score=lambda a: float(a.startswith("8"))) for n in range(3)]
    renderer, sampling = cast(Renderer, WordRenderer()), SamplingParams(max_tokens=1)
    evaluation = asyncio.run(evaluate(generator, renderer, problems, sampling, 4))
    assert evaluation.intervals["majority_at_4"] == Interval(mean=majority, low=majority, high=majority)


def test_bootstrap_agrees_with_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(5, 2, size=400)
    interval = bootstrap(values)
    half_width = 1.96 * values.std() / 20
    assert interval.mean == values.mean()
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.03)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.03)
    assert bootstrap(values) == interval


def test_gain_is_paired_by_problem() -> None:
    before, after = _evaluate(30), _evaluate(50)
    gain = after.gain_over(before)
    assert gain.mean == pytest.approx(0.2)
    # Paired: 20 problems changed and 80 did not, so the interval is narrower than that of two independent means.
    assert gain.high - gain.low == pytest.approx(2 * 1.96 * np.sqrt(0.2 * 0.8 / 100), rel=0.1)


def test_bootstrap_refuses_no_values_and_nan() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap(np.array([]))
    with pytest.raises(ValueError, match="given nan"):
        bootstrap(np.array([1.0, np.nan]))


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=20))
@settings(deadline=None, max_examples=20)
def test_an_interval_has_its_mean_and_lies_within_the_values(values: list[float]) -> None:
    interval = bootstrap(np.array(values))
    room = 1e-9 * max(map(abs, values))
    assert min(values) - room <= interval.low <= interval.mean + room
    assert interval.mean - room <= interval.high <= max(values) + room


def test_one_problem_has_an_interval_of_no_width() -> None:
    assert bootstrap(np.array([-2.5])) == Interval(mean=-2.5, low=-2.5, high=-2.5)


@pytest.mark.seconds
def test_resampling_many_problems_takes_little_memory() -> None:
    tracemalloc.start()
    interval = bootstrap(np.arange(20_000, dtype=np.float64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert interval.low < 9_999.5 < interval.high
    assert peak < 100e6  # all at once: 3.2 GB


@pytest.mark.stranger("F8")
def test_an_evaluation_says_how_many_problems_are_done() -> None:
    told: list[tuple[str, int, int]] = []

    def main() -> None:
        show_progress_with(lambda *progress: told.append(progress))
        _evaluate(30)

    contextvars.copy_context().run(main)
    assert told == [("evaluating", done, 100) for done in range(101)]
    _evaluate(30)  # nobody is told outside of that context
    assert len(told) == 101


def test_an_empty_answer_is_an_answer() -> None:
    problem = TextProblem(id="q", prompt="q", score=lambda answer: float(answer == ""))
    renderer = cast(Renderer, WordRenderer())
    silent = ScriptedGenerator(lambda prompt, i, seed: "")
    evaluation = asyncio.run(evaluate(silent, renderer, [problem], SamplingParams(max_tokens=1)))
    assert evaluation.reward.mean == 1


def test_evaluations_of_different_problems_are_not_compared() -> None:
    evaluation = _evaluate(30)
    other = Evaluation(groups=evaluation.groups[:60])
    with pytest.raises(ValueError, match=r"these have 100 and 60 problems, of which 60 are in both"):
        evaluation.gain_over(other)


def _answered(*right: list[bool], failures: int = 0) -> Evaluation:
    """One problem per list; True stands for a right answer, False for a wrong one."""
    return Evaluation(
        groups=tuple(
            Group(
                problem_id=str(i),
                prompt="",
                rollouts=tuple(single_turn((1,), completion("a"), reward=float(r)) for r in answers),
                failures=("gone",) * failures,
            )
            for i, answers in enumerate(right)
        )
    )


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_fraction_of_solving_subsets(num_right: int, k: int) -> None:
    answers = [True] * num_right + [False] * (5 - num_right)
    subsets = list(itertools.combinations(answers, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert _answered(answers).pass_at(k).mean == pytest.approx(expected)


def test_pass_at_1_is_the_mean_reward_of_right_and_wrong() -> None:
    evaluation = _answered([True, False, False], [True, True, False], [False] * 3)
    assert evaluation.pass_at(1).mean == pytest.approx(evaluation.reward.mean)
    assert evaluation.pass_at(3).mean == pytest.approx(2 / 3)
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"k is {k}; it must be between 1 and .* 3"):
            evaluation.pass_at(k)


@pytest.mark.stranger("D4")
def test_a_reward_that_misses_the_best_one_by_rounding_is_right() -> None:
    rollouts = tuple(single_turn((1,), completion("a"), reward=reward) for reward in [0.7 + 0.2 + 0.1] * 2 + [0.999])
    group = Group(problem_id="p", prompt="p", rollouts=rollouts)
    assert Evaluation(groups=(group,)).pass_at(1).mean == pytest.approx(2 / 3)
    assert Evaluation(groups=(group,)).pass_at(1, solved=0.0).mean == 1


def test_intervals_depend_on_the_number_of_answers() -> None:
    once, often = _answered([True], [False]), _answered([True, False, False, False, False, True], [False] * 6)
    assert list(once.intervals) == ["reward"]
    assert list(often.intervals) == ["reward", "pass_at_1", "pass_at_2", "pass_at_4", "pass_at_6"]
    assert often.intervals["pass_at_6"].mean == 0.5


def test_failed_rollouts_are_left_out() -> None:
    evaluation = _answered([True], [], failures=1)
    assert evaluation.reward.mean == evaluation.pass_at(1).mean == 1
    assert math.isnan(evaluation.pass_at(2).mean)
    assert evaluation.gain_over(evaluation).mean == 0
    nothing = _answered([], [], failures=1)
    assert math.isnan(nothing.reward.mean)
    assert math.isnan(nothing.gain_over(evaluation).mean)


def test_evaluation_has_seeds_of_its_own() -> None:
    sampling = SamplingParams(max_tokens=4, seed=3)
    assert eval_sampling(sampling, 1) == (replace(sampling, temperature=0.0), 1)
    often, num_samples = eval_sampling(sampling, 8)
    assert num_samples == 8
    assert often.seed is not None
    assert often.seed > step_seed(2**20, 2**20)
