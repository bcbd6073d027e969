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
_RESAMPLED_AT_ONCE = 1 << 20


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
        """Mean change of reward since an evaluation of the same problems, paired by problem.

        Raises ValueError when the problems are not the same, in the same order.
        """
        ours, theirs = ([group.problem_id for group in e.groups] for e in (self, before))
        if ours != theirs:
            raise ValueError(
                f"gain_over compares evaluations of the same problems; these have {len(ours)} and {len(theirs)} "
                f"problems, of which {len({*ours} & {*theirs})} are in both"
            )
        return bootstrap(self.rewards - before.rewards)


async def evaluate(
    generator: Generator, renderer: Renderer, problems: Sequence[Problem], sampling: SamplingParams
) -> Evaluation:
    """One completion of each problem under the generator's current weights. Temperature 0 makes it repeatable."""
    samples = await sample(generator, renderer, problems, sampling, num_samples=1)
    return Evaluation(groups=tuple(map(score, samples)))


def bootstrap(values: NDArray[np.float64]) -> Interval:
    """Mean of [P] values with the percentile bootstrap's 95 % interval (Efron and Tibshirani 1993, chapter 13).

    The resampling is seeded: the same values always have the same interval. Raises ValueError for no values, and for
    one that is not finite.
    """
    if len(values) == 0:
        raise ValueError("bootstrap needs at least one value")
    if not np.isfinite(values).all():
        raise ValueError(f"bootstrap was given {values[~np.isfinite(values)][0]}; every value must be finite")
    random = np.random.default_rng(0)
    at_once = max(_RESAMPLED_AT_ONCE // len(values), 1)  # so that many problems do not take gigabytes
    counts = [min(at_once, _NUM_RESAMPLES - start) for start in range(0, _NUM_RESAMPLES, at_once)]
    picks = (random.integers(len(values), size=(count, len(values))) for count in counts)
    means = np.concatenate([values[pick].mean(axis=1) for pick in picks])
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(mean=float(values.mean()), low=float(low), high=float(high))
