"""Advantages per token: generalised advantage estimation, and REINFORCE++ which needs no critic.

NumPy arrays of one completion; what is normalised is normalised over all completions of a step. Legend: N tokens of one
completion, whose action at step t is token t.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl.advantages.group_relative import group_mean_std, has_signal

Array = NDArray[np.float64]


def token_rewards(reward: float, kl: NDArray[np.floating], kl_coef: float) -> Array:
    """[N] rewards of a completion's tokens: -kl_coef * kl each, and the completion's own reward on the last.

    `kl` [N] is the generator's log-prob minus the reference's: InstructGPT's penalty in the reward, eq. 2 of
    https://arxiv.org/abs/2203.02155. A completion without tokens has none to reward.
    """
    rewards = -kl_coef * np.asarray(kl, dtype=np.float64)
    rewards[-1:] += reward
    return rewards


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    last_value: float = 0.0,
) -> tuple[Array, Array]:
    """[N] rewards and values -> [N] advantages and [N] returns (advantage + value), what a critic learns to predict.

    advantage_t = sum over l of (gamma gae_lambda)^l delta_{t+l}, delta_t = reward_t + gamma value_{t+1} - value_t:
    eq. 16 of https://arxiv.org/abs/1506.02438. `values[t]` is the critic's value of what precedes token t. `last_value`
    is the value of what follows the last token: 0 for an episode that ended, the critic's for one that was cut short.

    Raises ValueError for lengths that differ, and for factors outside [0, 1].
    """
    if np.shape(rewards) != np.shape(values) or np.ndim(rewards) != 1:
        raise ValueError(
            f"gae: rewards has shape {np.shape(rewards)} and values {np.shape(values)}; "
            "both must be of one dimension and equally long"
        )
    for name, factor in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= factor <= 1:
            raise ValueError(f"gae: {name} is {factor}; it must be in [0, 1]")
    current = np.asarray(values, dtype=np.float64)
    following = np.append(current[1:], last_value)[: len(current)]
    deltas = np.asarray(rewards, dtype=np.float64) + gamma * following - current
    advantages = np.zeros_like(deltas)
    later = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        later = deltas[t] + gamma * gae_lambda * later
        advantages[t] = later
    return advantages, advantages + current


def normalize(advantages: Sequence[Array]) -> list[Array]:
    """One [N] per completion -> the same minus the mean and over the standard deviation of all tokens of all of them.

    All 0 when they are all equal.
    """
    starts = np.cumsum([0, *(len(array) for array in advantages)])
    together = group_mean_std(np.concatenate([*advantages, np.zeros(0)]))
    return [together[start:end] for start, end in pairwise(starts)]


def reinforce_plus_plus(
    rewards: Sequence[float] | Array, kl: Sequence[NDArray[np.floating]], kl_coef: float = 0.0
) -> list[Array]:
    """[B] rewards and one [N] of KL per completion -> one [N] of advantages per completion, of all of a step at once.

    Each token has its completion's reward minus kl_coef times the KL from there on, normalised over the step:
    REINFORCE++, https://arxiv.org/abs/2501.03262. For its variant with a baseline, give `group_mean(rewards)` of each
    group in the place of the rewards. `kl` is as in `token_rewards`; zeros where there is no reference.
    """
    undiscounted: list[Array] = []
    for reward, of_tokens in zip(rewards, kl, strict=True):
        zeros = np.zeros(len(of_tokens))
        undiscounted.append(gae(token_rewards(reward, of_tokens, kl_coef), zeros, gae_lambda=1.0)[0])
    return normalize(undiscounted)


def explained_variance(predicted: Sequence[NDArray[np.floating]], returns: Sequence[NDArray[np.floating]]) -> float:
    """1 - Var(returns - predicted) / Var(returns) over all tokens: 1 a perfect critic, 0 one that knows only the mean.

    NaN when all returns are equal, and there is nothing to explain.
    """
    target = np.concatenate([np.asarray(array, dtype=np.float64) for array in returns])
    error = target - np.concatenate([np.asarray(array, dtype=np.float64) for array in predicted])
    return float(1 - error.var() / target.var()) if has_signal(target) else float("nan")
