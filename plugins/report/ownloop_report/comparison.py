"""What runs achieved, and whether two configurations differ: Welch's t-test over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.runs.loop_config import ABSENT, differences
from rl.rollouts.evaluation import Interval

_NOT_COMPARED = ("seed", "log")
"""Fields in which runs of one configuration may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalReward:
    """What a run achieved."""

    run: str
    seed: Any
    step: int
    """The steps before its last evaluation."""
    reward: float
    """Mean reward on held-out problems in that evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Runs that differ in their seeds only."""

    name: str
    runs: tuple[FinalReward, ...]

    @property
    def rewards(self) -> list[float]:
        """The final rewards, by run."""
        return [run.reward for run in self.runs]


def same_configuration(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two configurations (in JSON types) differ in their seeds at most."""
    return not named_differences(one, other)


def named_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted field -> the two values, without the fields in which runs of one configuration may differ."""
    found = differences(one, other)
    return {field: pair for field, pair in found.items() if field.partition(".")[0] not in _NOT_COMPARED}


def final_reward(run: str, config: Mapping[str, object], rows: Sequence[Mapping[str, float]]) -> FinalReward:
    """The last evaluation in a run's metrics. Raises ValueError for a run without one."""
    evaluations = [row for row in rows if math.isfinite(row.get("eval_reward", math.nan))]
    if not evaluations:
        raise ValueError(f"{run} has no evaluation of the held-out reward yet; there is nothing to compare")
    last = evaluations[-1]
    return FinalReward(
        run=run, seed=config.get("seed", ABSENT), step=int(last["step"]), reward=float(last["eval_reward"])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardDifference:
    """The difference between the final rewards of two configurations, over their runs."""

    interval: Interval
    """The difference of the means with its 95 % interval."""
    p_value: float
    """The probability of a difference at least as large if there were none."""


def welch(better: Sequence[float], worse: Sequence[float]) -> RewardDifference:
    """Mean of the first minus mean of the second. Raises ValueError unless both have at least two values.

    Where neither varies, the interval has no width, and the p-value is 0, or 1 without a difference.
    """
    if min(len(better), len(worse)) < 2:
        raise ValueError(f"a test over seeds needs two runs on each side; there are {len(better)} and {len(worse)}")
    a, b = np.asarray(better, dtype=np.float64), np.asarray(worse, dtype=np.float64)
    mean = float(a.mean() - b.mean())
    parts = float(a.var(ddof=1) / len(a)), float(b.var(ddof=1) / len(b))
    error = math.sqrt(sum(parts))
    if error == 0:
        return RewardDifference(interval=Interval(mean=mean, low=mean, high=mean), p_value=float(mean == 0))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    reach = t_quantile(0.975, freedom) * error
    return RewardDifference(
        interval=Interval(mean=mean, low=mean - reach, high=mean + reach),
        p_value=2 * t_tail(abs(mean) / error, freedom),
    )


def t_quantile(probability: float, freedom: float) -> float:
    """The value below which a t-distributed variable lies with this probability, above 0.5."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - probability:
        high *= 2
    for _ in range(80):  # halves the interval until float64 has no number in between
        middle = (low + high) / 2
        low, high = (low, middle) if t_tail(middle, freedom) < 1 - probability else (middle, high)
    return high


def t_tail(value: float, freedom: float) -> float:
    """The probability that a t-distributed variable is above a value of at least 0."""
    import mpmath

    share = freedom / (freedom + value**2)
    return float(mpmath.betainc(freedom / 2, 0.5, 0, share, regularized=True)) / 2
