"""Advantages per token: generalised advantage estimation, and REINFORCE++, which needs no critic.

In reinforcement-learning terms, the action at time t is token t. Legend: N tokens of one completion, B completions.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl.advantages.group_relative import group_mean_std, has_signal

Array = NDArray[np.float64]


def token_rewards(reward: float, kl: NDArray[np.floating], kl_coef: float) -> Array:
    """[N] rewards of a completion's tokens: -kl_coef * kl for each, plus the completion's reward on the last token.

    `kl` [N] estimates the KL from the reference, token by token (`rl.advantages.kl.kl_estimates`): InstructGPT's
    penalty, eq. 2 of https://arxiv.org/abs/2203.02155. The result is empty for a completion without tokens.
    """
    rewards = -kl_coef * np.asarray(kl, dtype=np.float64)
    rewards[-1:] += reward  # a slice, because there may be no last token
    return rewards


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    last_value: float = 0.0,
) -> tuple[Array, Array]:
    """[N] rewards and values -> [N] advantages and [N] returns (advantage + value), the targets of the critic.

    advantage_t = sum over l of (gamma gae_lambda)^l delta_{t+l}, delta_t = reward_t + gamma value_{t+1} - value_t:
    eq. 16 of https://arxiv.org/abs/1506.02438. `values[t]` is the critic's value of the state before token t, and
    `last_value` that of the state after the last token: 0 for an episode that ended, the critic's for a truncated one.

    Raises ValueError if the lengths differ or if a factor is outside [0, 1].
    """
    if np.shape(rewards) != np.shape(values) or np.ndim(rewards) != 1:
        raise ValueError(
            f"gae: rewards has shape {np.shape(rewards)} and values {np.shape(values)}; "
            "both must have one dimension and the same length"
        )
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= factor <= 1:
            raise ValueError(f"gae: {name} is {factor}; it must be in [0, 1]")
    current = np.asarray(values, dtype=np.float64)
    following = np.append(current[1:], last_value)[: len(current)]  # cut again, for a completion without tokens
    deltas = np.asarray(rewards, dtype=np.float64) + gamma * following - current
    advantages = np.zeros_like(deltas)
    advantage = 0.0
    for t in range(len(deltas) - 1, -1, -1):  # backwards: each advantage contains the discounted next one
        advantage = deltas[t] + gamma * gae_lambda * advantage
        advantages[t] = advantage
    return advantages, advantages + current


def normalize(advantages: Sequence[Array]) -> list[Array]:
    """Normalises advantages, one [N] per completion, to mean 0 and standard deviation 1 over all tokens of the step.

    If all of them are equal, they become 0.
    """
    starts = np.cumsum([0, *(len(array) for array in advantages)])
    normalized = group_mean_std(np.concatenate([*advantages, np.zeros(0)]))  # zeros(0): there may be no completion
    return [normalized[start:end] for start, end in pairwise(starts)]


def reinforce_plus_plus(
    rewards: Sequence[float] | Array, kl: Sequence[NDArray[np.floating]], kl_coef: float = 0.0
) -> list[Array]:
    """[B] rewards and one [N] of KL per completion -> one [N] of advantages per completion, for a whole step.

    A token's advantage is its completion's reward minus kl_coef times the sum of the KL from this token on, normalised
    over the step: REINFORCE++, https://arxiv.org/abs/2501.03262. For its variant with a baseline, pass each group's
    `group_mean(rewards)` as rewards. `kl` is that of `token_rewards`, or zeros without a reference.
    """
    rewards_to_go: list[Array] = []
    for reward, token_kl in zip(rewards, kl, strict=True):
        no_values = np.zeros(len(token_kl))  # with values of 0 and lambda 1, GAE's advantages are sums of rewards
        rewards_to_go.append(gae(token_rewards(reward, token_kl, kl_coef), no_values, gae_lambda=1.0)[0])
    return normalize(rewards_to_go)


def explained_variance(predicted: Sequence[NDArray[np.floating]], returns: Sequence[NDArray[np.floating]]) -> float:
    """1 - Var(returns - predicted) / Var(returns) over all tokens.

    1 means a perfect critic, 0 one that is no better than a constant. NaN if all returns are equal.
    """
    target = np.concatenate([np.asarray(array, dtype=np.float64) for array in returns])
    error = target - np.concatenate([np.asarray(array, dtype=np.float64) for array in predicted])
    return float(1 - error.var() / target.var()) if has_signal(target) else float("nan")
