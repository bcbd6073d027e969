"""Reward on held-out problems, with the uncertainty that comes from having only so many of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl.protocols import Generator, Problem
from rl.rendering import Renderer
from rl.rollouts import sample, score
from rl.types import Group, SamplingParams

_NUM_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over the held-out problems."""

    groups: tuple[Group, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[P] mean reward of each problem."""
        return np.array([group.rewards.mean() for group in self.groups])

    @property
    def reward(self) -> Interval:
        """Mean reward over the problems."""
        return bootstrap(self.rewards)

    def gain_over(self, before: "Evaluation") -> Interval:
        """Mean change of reward since an evaluation of the same problems, paired by problem."""
        return bootstrap(self.rewards - before.rewards)


async def evaluate(
    generator: Generator, renderer: Renderer, problems: Sequence[Problem], sampling: SamplingParams
) -> Evaluation:
    """One completion of each problem under the generator's current weights. Temperature 0 makes it repeatable."""
    samples = await sample(generator, renderer, problems, sampling, num_samples=1)
    return Evaluation(groups=tuple(map(score, samples)))


def bootstrap(values: NDArray[np.float64]) -> Interval:
    """Mean of [P] values with the percentile bootstrap's 95 % interval (Efron and Tibshirani 1993, chapter 13).

    The resampling is seeded: the same values always have the same interval.
    """
    if len(values) == 0:
        raise ValueError("bootstrap needs at least one value")
    picks = np.random.default_rng(0).integers(len(values), size=(_NUM_RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), [2.5, 97.5])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))
