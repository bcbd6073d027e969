"""Group-relative advantages: from the rewards of a group to one advantage per rollout. Legend: G rollouts."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
_ROUNDING = 1e-12
_SMALLEST = 1e-290  # a difference below it leaves float64 too few digits to be centred and scaled


def has_signal(rewards: Rewards) -> bool:
    """Whether the rewards differ, so that one rollout is better than another.

    Differences of the size of floating-point rounding do not count: normalising would turn them into advantages.
    """
    return len(rewards) > 0 and bool(np.ptp(rewards) > max(_ROUNDING * np.abs(rewards).max(), _SMALLEST))


def group_mean(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the group's mean, as in Dr. GRPO (https://arxiv.org/abs/2503.20783).

    Here, as in the other functions of this file, all advantages are 0 if all rewards are equal.
    """
    return rewards - rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)


def group_mean_std(rewards: Rewards) -> Rewards:
    """[G] -> [G]: (reward - mean) / standard deviation: GRPO, section 4.1.2 of https://arxiv.org/abs/2402.03300.

    Many implementations add a small constant to the deviation. It is not in the paper and would make rewards of a small
    scale count for less, so it is left out.
    """
    centered = group_mean(rewards)
    if not centered.any():
        return centered
    centered = centered / np.abs(centered).max()  # the squares of very large or very small rewards would overflow
    return centered / centered.std()


def leave_one_out(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the mean reward of the other rollouts: RLOO (https://arxiv.org/abs/2402.14740).

    Raises ValueError for a group of one rollout.
    """
    if len(rewards) == 1:
        raise ValueError("leave_one_out was given 1 reward; a group must have at least 2 to be compared")
    # reward - mean of the others = (reward - mean of all) * G / (G - 1). The maximum is for a group of none.
    return group_mean(rewards) * len(rewards) / max(len(rewards) - 1, 1)


ADVANTAGES: Mapping[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
"""Advantage functions by the name that a recipe uses."""
