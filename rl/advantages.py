"""From the rewards of a group to one advantage per rollout. Legend: G rollouts of one prompt."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]


def group_mean(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the group's mean. Dr. GRPO (https://arxiv.org/abs/2503.20783) stops here."""
    return rewards - rewards.mean()


def group_mean_std(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus mean, over the standard deviation: GRPO, section 4.1.2 of https://arxiv.org/abs/2402.03300.

    A group whose rewards are all equal has advantage 0.
    """
    std = rewards.std()
    return np.zeros_like(rewards) if std == 0 else (rewards - rewards.mean()) / std


def leave_one_out(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the mean of the others: RLOO (https://arxiv.org/abs/2402.14740). G at least 2."""
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


ADVANTAGES: Mapping[str, Callable[[Rewards], Rewards]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}
"""By the name that a recipe uses."""
