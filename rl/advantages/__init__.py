"""Advantages from rewards, relative to a group or with a critic, and the KL divergence in rewards and metrics.

In reinforcement-learning terms, the action at time t is token t. The KL divergence between two policies is estimated
from their log-probs of tokens that one of them sampled. It is in NumPy, for rewards, metrics and decisions of the
controller; `rl.losses.shared` has the same estimators with gradients.

Legend: G rollouts of a group, B completions, T positions of a datum, N scored positions, which are the tokens of one
completion.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl.algorithms import Algorithms
from rl.checks import check_between, check_known, named_function
from rl.losses.shared import MAX_LOG_RATIO, KLEstimator
from rl.system.plugins import load_all
from rl.types import Datum

Rewards = NDArray[np.float64]
Array = NDArray[np.float64]
_ROUNDING = 1e-12
_SMALLEST = 1e-290  # a difference below it leaves float64 too few digits to be centred and scaled


def get_advantage(name: str) -> Callable[..., Rewards]:
    """The function of a name that `ownloop list --advantages` shows, or that "module:function" names.

    It is called with the rewards [G] of one group. Raises ValueError for a name that is not known.
    """
    if ":" in name:
        return named_function("advantage", name)
    check_known("advantage", name, known := all_advantages(), "advantages")
    return known[name]


def has_signal(rewards: Rewards) -> bool:
    """Whether the rewards differ, so that one rollout is better than another.

    Differences of the size of floating-point rounding do not count: normalising would turn them into advantages. Raises
    ValueError for a reward that is NaN or infinite.
    """
    if len(rewards) == 0:
        return False
    if len(wrong := np.flatnonzero(~np.isfinite(rewards))):
        raise ValueError(f"rewards[{wrong[0]}] is {rewards[wrong[0]]}; rewards and advantages must be finite")
    least, most = float(rewards.min()), float(rewards.max())
    return most - least > max(_ROUNDING * max(-least, most), _SMALLEST)


def group_mean(rewards: Rewards) -> Rewards:
    """[G] -> [G]: reward minus the group's mean, as in Dr. GRPO (https://arxiv.org/abs/2503.20783).

    Here, as in the other functions of `ADVANTAGES`, all advantages are 0 if all rewards are equal.
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


def all_advantages() -> dict[str, Callable[..., Rewards]]:
    """All advantage functions by name: `ADVANTAGES`, and the tables of installed plug-ins."""
    tables = [part.advantages for part in load_all("algorithms", Algorithms).values()]
    return {name: function for table in (*tables, ADVANTAGES) for name, function in table.items()}


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
    check_between(0, 1, **{"gae: gamma": gamma, "gae: gae_lambda": gae_lambda})
    current = np.asarray(values, dtype=np.float64)
    following = np.append(current[1:], last_value)[: len(current)]  # cut again, for a completion without tokens
    deltas = np.asarray(rewards, dtype=np.float64) + gamma * following - current
    advantages = np.zeros_like(deltas)
    advantage = 0.0
    for t in range(len(deltas) - 1, -1, -1):  # backwards: each advantage contains the discounted next one
        advantage = deltas[t] + gamma * gae_lambda * advantage
        advantages[t] = advantage
    return advantages, advantages + current


def token_rewards(reward: float, kl: NDArray[np.floating], kl_coef: float) -> Array:
    """[N] rewards of a completion's tokens: -kl_coef * kl for each, plus the completion's reward on the last token.

    `kl` [N] estimates the KL from the reference, token by token (`rl.advantages.kl_estimates`): InstructGPT's
    penalty, eq. 2 of https://arxiv.org/abs/2203.02155. The result is empty for a completion without tokens.
    """
    rewards = -kl_coef * np.asarray(kl, dtype=np.float64)
    rewards[-1:] += reward  # a slice, because there may be no last token
    return rewards


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


def kl_estimates(
    generator_logprobs: NDArray[np.floating], other_logprobs: NDArray[np.floating], estimator: KLEstimator
) -> Array:
    """[N] estimates, one per token, of KL(generator || other): k1, k2 or k3 of http://joschu.net/blog/kl-approx.html.

    The tokens must have been sampled by the first policy. k1, the plain difference, is the usual penalty in the reward.
    k3 is never negative and has low variance, which suits a measurement. It is bounded as in `rl.losses.shared`.
    """
    log_ratio = np.asarray(generator_logprobs, dtype=np.float64) - np.asarray(other_logprobs, dtype=np.float64)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    bounded = np.minimum(-log_ratio, MAX_LOG_RATIO)
    return np.expm1(bounded) - bounded


def kl_from_generator(batch: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> float:
    """KL(generator || policy) by k3, averaged over scored tokens. `logprobs` are the policy's, one [T] per datum."""
    pairs = zip(sampled_logprobs(batch), gather_scored(batch, logprobs), strict=True)
    return float(np.concatenate([kl_estimates(q, p, "k3") for q, p in pairs]).mean())


def sampled_logprobs(batch: Sequence[Datum]) -> list[NDArray[np.float32]]:
    """One [N] per datum: the generator's log-probs of the scored tokens."""
    return gather_scored(batch, [datum.loss_inputs["logprobs"] for datum in batch])


def gather_scored(batch: Sequence[Datum], arrays: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """One [T] per datum -> one [N] per datum: the values at its scored positions."""
    return [array[datum.counted] for datum, array in zip(batch, arrays, strict=True)]


def scatter_scored(datum: Datum, values: NDArray[np.floating]) -> NDArray[np.float32]:
    """[N] values of a datum's scored positions -> [T], 0 at all other positions."""
    array = np.zeros(len(datum.tokens), dtype=np.float32)
    array[datum.counted] = values
    return array
