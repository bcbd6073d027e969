import asyncio
from typing import cast

import numpy as np
import pytest

from rl.envs.procedural import TextProblem
from rl.evaluation import Evaluation, bootstrap, evaluate
from rl.rendering import Renderer
from rl.types import SamplingParams
from tests.rl.fakes import ScriptedGenerator, WordRenderer


def _evaluate(num_right: int) -> Evaluation:
    generator = ScriptedGenerator(lambda prompt, i, seed: "yes" if prompt[0] <= num_right else "no")
    problems = [TextProblem(id=str(n), prompt="x" * n, score=lambda a: float(a == "yes")) for n in range(1, 101)]
    renderer = cast(Renderer, WordRenderer())
    return asyncio.run(evaluate(generator, renderer, problems, SamplingParams(max_tokens=1, temperature=0)))


def test_evaluation_is_the_mean_over_problems() -> None:
    evaluation = _evaluate(30)
    assert evaluation.reward.mean == pytest.approx(0.3)
    assert evaluation.reward.low < 0.3 < evaluation.reward.high


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


def test_no_problems_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bootstrap(np.array([]))
