"""PPO's middle: from rollouts, a critic's values and a reference's log-probs to what policy and critic learn from.

Legend: N scored tokens of one datum, T its positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from rl.advantages.gae import explained_variance, gae, normalize, token_rewards
from rl.advantages.kl import at_scored, kl_estimates, sampled_logprobs, to_positions
from rl.algorithms.metrics import logprob_mismatch, merge_outputs
from rl.checks import check_at_least, check_known
from rl.losses.shared import KLEstimator
from rl.rollouts.episodes import with_inputs
from rl.types import Datum, ForwardBackwardOutput

Arrays = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOParams:
    """How rewards become advantages, and how often they are learned from."""

    kl_coef: float = 0.05
    """What each token's KL to the reference costs in its reward; 0 only measures it."""
    kl_estimator: KLEstimator = "k1"
    """k1 is InstructGPT's penalty; k3 never rewards a token for being less probable than the reference has it."""
    gamma: float = 1.0
    """What a reward one token later counts for."""
    gae_lambda: float = 1.0
    """1: advantages without bias, right for a reward at the end. Less: the critic's word for what follows."""
    num_epochs: int = 1
    """Passes over a step's rollouts."""
    minibatches_per_epoch: int = 1
    """Optimizer steps of each pass."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_known("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        check_at_least(0, kl_coef=self.kl_coef)
        check_at_least(1, num_epochs=self.num_epochs, minibatches_per_epoch=self.minibatches_per_epoch)
        gae(np.zeros(1), np.zeros(1), gamma=self.gamma, gae_lambda=self.gae_lambda)


def ppo_advantages(
    batch: Sequence[Datum], rewards: Sequence[float], values: Arrays | None, reference: Arrays, params: PPOParams
) -> tuple[list[Datum], dict[str, float]]:
    """The batch with `advantages` for loss "ppo" and `old_values` and `returns` for loss "value", and metrics of it.

    Each token is rewarded with -kl_coef times its KL to the reference, the last one with the rollout's reward as well;
    advantages are normalised over the step. An episode that was cut short counts as ended: it got its reward.
    `values` and `reference` have one [T] per datum. The explained variance is of rewards to go: what the critic knew
    of what was to come. Raises ValueError without values, which a trainer that is no critic has not.
    """
    if values is None:
        raise ValueError("there are no values; the critic must be a trainer with head='value'")
    generator, frozen, before = sampled_logprobs(batch), at_scored(batch, reference), at_scored(batch, values)
    kl = [kl_estimates(q, f, params.kl_estimator) for q, f in zip(generator, frozen, strict=True)]
    rewarded = [token_rewards(reward, penalty, params.kl_coef) for reward, penalty in zip(rewards, kl, strict=True)]
    pairs = [
        gae(of_tokens, value, gamma=params.gamma, gae_lambda=params.gae_lambda)
        for of_tokens, value in zip(rewarded, before, strict=True)
    ]
    to_go = [gae(of_tokens, np.zeros(len(of_tokens)), gamma=params.gamma, gae_lambda=1.0)[1] for of_tokens in rewarded]
    advantages = normalize([advantage for advantage, _ in pairs])
    ready = with_inputs(
        batch,
        advantages=[to_positions(datum, advantage) for datum, advantage in zip(batch, advantages, strict=True)],
        returns=[to_positions(datum, returns) for datum, (_, returns) in zip(batch, pairs, strict=True)],
        old_values=list(values),
    )
    k3 = [kl_estimates(q, f, "k3") for q, f in zip(generator, frozen, strict=True)]
    return ready, {
        "kl_reference": float(np.concatenate(k3).mean()),
        "value_mean": float(np.concatenate(before).mean()),
        "explained_variance": explained_variance(before, to_go),
    }


def minibatches(batch: Sequence[Datum], params: PPOParams, seed: Sequence[int]) -> list[list[Datum]]:
    """The minibatches of every epoch, each epoch in an order of its own that `seed` decides.

    Neighbours with the same prompt stay together, so that a minibatch computes their prompt once; a minibatch has as
    many prompts as any other, or one more.
    """
    random = np.random.default_rng(seed)
    groups = [list(group) for _, group in groupby(batch, key=_prompt_tokens)]
    orders = [random.permutation(len(groups)) for _ in range(params.num_epochs)]
    count = min(params.minibatches_per_epoch, len(groups))
    parts = [part for order in orders for part in np.array_split(order, count)]
    return [[datum for i in part for datum in groups[i]] for part in parts]


def together(
    parts: Sequence[Sequence[Datum]], outputs: Sequence[tuple[ForwardBackwardOutput, ...]]
) -> tuple[list[Datum], ForwardBackwardOutput, dict[str, float]]:
    """What was learned from in a step, the policy's output for it, and metrics, from each minibatch's two outputs.

    `outputs` are the policy's and the critic's. The metrics are their losses per token, and the train-inference
    mismatch of the first minibatch; later minibatches are scored by a policy that has learned since it sampled them.
    """
    of_policy, of_critic = (merge_outputs(column) for column in zip(*outputs, strict=True))
    losses = {
        name: output.metrics["loss"] / output.metrics["num_loss_tokens"]
        for name, output in (("loss", of_policy), ("critic_loss", of_critic))
    }
    return [datum for part in parts for datum in part], of_policy, losses | logprob_mismatch(parts[0], outputs[0][0])


def _prompt_tokens(datum: Datum) -> tuple[int, ...]:
    """What precedes the first scored token."""
    return tuple(datum.tokens[: int(np.argmax(datum.weights != 0)) + 1].tolist())
