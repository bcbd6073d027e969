"""Advantages of recent papers, each a function beside its citation.

`published.py` holds `ADVANTAGES`, so a recipe's `advantage` finds the functions of one group. The others
are for scripts: they need more than the rewards of one group. Legend: G rollouts of a group, K rewards of a rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rl.advantages import Rewards, group_mean, group_mean_std, has_signal, normalize

_ROUNDING = 1e-9  # twenty tests of 0.05 each are a reward of 1.0000000000000002


def pass_at_k(rewards: Rewards) -> Rewards:
    """[G] -> [G]: the best reward minus the best of the others, for the best rollout; 0 for all others.

    It is each rollout's leave-one-out contribution to the best of k = G: eq. 9 of https://arxiv.org/abs/2503.19595.
    """
    advantages = np.zeros_like(rewards)
    if has_signal(rewards) and has_signal(best := np.sort(rewards)[-2:]):
        advantages[rewards.argmax()] = best[1] - best[0]
    return advantages


def max_rl(rewards: Rewards) -> Rewards:
    """[G] -> [G]: (reward - mean) / mean, for rewards of 0 and 1: MaxRL, https://arxiv.org/abs/2602.02710.

    Rare successes count for more than under GRPO: the gradient approaches that of the log-likelihood of success. The
    paper derives it for these rewards only. Raises ValueError for a reward outside [0, 1].
    """
    if len(rewards) and not (rewards.min() >= -_ROUNDING and rewards.max() <= 1 + _ROUNDING):
        raise ValueError(
            f"max_rl was given a reward of {rewards.min() if rewards.min() < 0 else rewards.max():g}; rewards must be "
            "in [0, 1], or use group_mean_std"
        )
    return group_mean(rewards) / rewards.mean() if has_signal(rewards) else np.zeros_like(rewards)


def optimal_baseline(rewards: Rewards, lengths: NDArray[np.int64]) -> Rewards:
    """[G] and [G] numbers of sampled tokens -> [G]: reward minus the mean reward, each weighted by its length.

    The baseline of least variance, if a sequence's squared gradient grows with its length: OPO, eq. 9 of
    https://arxiv.org/abs/2505.23585.
    """
    if not has_signal(rewards) or not lengths.any():
        return np.zeros_like(rewards)
    return rewards - np.average(rewards, weights=lengths)


ADVANTAGES: Mapping[str, Callable[..., Rewards]] = {
    "pass_at_k": pass_at_k,
    "max_rl": max_rl,
    "optimal_baseline": optimal_baseline,
}
"""The functions of one group by the name that a recipe uses."""


def remax(rewards: Rewards, greedy_reward: float) -> Rewards:
    """[G] -> [G]: reward minus that of the greedy answer to the same prompt: ReMax, https://arxiv.org/abs/2310.10505.

    `greedy_reward` comes from one rollout sampled at temperature 0.
    """
    has_signal(np.append(rewards, greedy_reward))  # raises ValueError for a NaN
    return rewards - greedy_reward


def gpg(groups: Sequence[Rewards]) -> list[Rewards]:
    """One [G] of rewards per group -> one [G] per group: reward minus the group's mean, times all / informative groups.

    A group whose rewards are equal has no gradient; the factor restores the step's size. Group policy gradient, eqs. 6
    and 7 of https://arxiv.org/abs/2504.02546, with its F_norm at 1.
    """
    informative = sum(map(has_signal, groups))
    return [group_mean(rewards) * len(groups) / max(informative, 1) for rewards in groups]


def batch_normalized(groups: Sequence[Rewards]) -> list[Rewards]:
    """One [G] of rewards per group -> one [G] per group: minus the group's mean, over the step's standard deviation.

    The baseline variant of REINFORCE++, https://arxiv.org/abs/2501.03262, without a KL penalty. An easy group and a
    hard one keep the sizes of their differences, which `group_mean_std` makes equal.
    """
    return normalize([group_mean(rewards) for rewards in groups])


def decoupled(groups: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> list[Rewards]:
    """One [G, K] of rewards per group and [K] weights -> one [G] per group: GDPO, https://arxiv.org/abs/2601.05242.

    Each kind of reward is normalised within its group, the results are summed with the weights, and the sums are
    normalised over the step: eqs. 4 to 6. So two rollouts with the same sum of rewards can differ.
    """
    sums: list[Rewards] = []
    for rewards in groups:
        if rewards.ndim != 2 or rewards.shape[1] != len(weights):
            raise ValueError(f"decoupled: rewards has shape {rewards.shape}; it must be [G, {len(weights)}]")
        columns = [weight * group_mean_std(rewards[:, k]) for k, weight in enumerate(weights)]
        sums.append(np.sum(columns, axis=0))
    return normalize(sums)


@dataclass
class RoleBaselines:
    """One moving mean of rewards per role, for self-play: RAE, section 3.3 of https://arxiv.org/abs/2506.24119.

    The two sides of a game have different chances, so each return is compared with its own role's.
    """

    decay: float = 0.95
    means: dict[str, float] = field(default_factory=dict[str, float])
    """Role -> moving mean, from 0. A loop saves it with its checkpoint."""

    def __post_init__(self) -> None:
        """Raises ValueError for a decay outside [0, 1)."""
        if not 0 <= self.decay < 1:
            raise ValueError(f"RoleBaselines.decay is {self.decay}; it must be in [0, 1)")

    def advantage(self, role: str, reward: float) -> float:
        """Updates the role's mean with the reward, and returns the reward minus this mean."""
        has_signal(np.array([reward]))  # raises ValueError for a NaN, which would stay in the mean
        self.means[role] = self.decay * self.means.get(role, 0.0) + (1 - self.decay) * reward
        return reward - self.means[role]
