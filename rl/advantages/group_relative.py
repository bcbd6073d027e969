"""From the rewards of a group to one advantage per rollout. Legend: G rollouts of one prompt."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
_ROUNDING = 1e-12


def has_signal(rewards: Rewards) -> bool:
    """Whether they differ by more than the rounding of their sum, so that one can be told to be better than another."""
    return len(rewards) > 0 and bool(np.ptp(rewards) > _ROUNDING * np.abs(rewards).max())


def group_mean(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the group's mean. Dr. GRPO (https://arxiv.org/abs/2503.20783) stops here.

    A group whose rewards are all equal has advantage 0; so it is for every function here.
    """
    return rewards - rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)


def group_mean_std(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus mean, over the standard deviation: GRPO, section 4.1.2 of https://arxiv.org/abs/2402.03300.

    Without the constant that implementations add to the deviation: it is not in the paper, and rewards of a small scale
    would be learned from less.
    """
    above = group_mean(rewards)
    if not above.any():
        return above
    above = above / np.abs(above).max()  # squares of very large or very small rewards are not numbers any more
    return above / above.std()


def leave_one_out(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the mean of the others: RLOO (https://arxiv.org/abs/2402.14740).

    Raises ValueError for a group of one, which has no others.
    """
    if len(rewards) == 1:
        raise ValueError("leave_one_out was given 1 reward; a group must have at least 2 to be compared")
    return group_mean(rewards) * len(rewards) / max(len(rewards) - 1, 1)


ADVANTAGES: Mapping[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
"""By the name that a recipe uses."""
