"""The part of PPO between sampling and training: advantages, minibatches and metrics of a policy with a critic.

Legend: N scored tokens of one datum, T its positions.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from rl.advantages import (
    explained_variance,
    gae,
    gather_scored,
    kl_estimates,
    normalize,
    sampled_logprobs,
    scatter_scored,
    token_rewards,
)
from rl.algorithms.metrics import logprob_mismatch, merge_outputs
from rl.configuration import NotNegative, UpToOne, configuration
from rl.data.packing import shareable_prefix
from rl.losses import get_loss
from rl.losses.shared import KLEstimator
from rl.protocols import Trainer
from rl.rollouts.episodes import with_inputs
from rl.types import Datum, ForwardBackwardOutput

Arrays = Sequence[NDArray[np.float32]]


@configuration
class PPOParams:
    """PPO's own hyper-parameters: the KL penalty, the discounts of GAE, and the passes over a step's rollouts."""

    kl_coef: NotNegative = 0.05
    """Weight of the per-token KL penalty in the reward. With 0 the KL is measured but not penalised."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the penalty. k1 is InstructGPT's. k3 is never negative, so that it rewards no token for being less
    probable than under the reference."""
    gamma: UpToOne = 1.0
    """Discount per token: a reward one token later counts this much."""
    gae_lambda: UpToOne = 1.0
    """GAE's lambda. 1 gives unbiased advantages and suits a reward at the end of the episode. Smaller values rely more
    on the critic: less variance, more bias."""
    num_epochs: PositiveInt = 1
    """Passes over a step's rollouts."""
    minibatches_per_epoch: PositiveInt = 1
    """Optimizer steps per pass."""


async def scored(
    batch: Sequence[Datum], policy: Trainer, critic: Trainer, reference: Trainer, loss_config: Mapping[str, object]
) -> tuple[Sequence[Datum], Arrays | None, Arrays]:
    """The batch, the critic's values and the reference's log-probs, one [T] per datum.

    If `loss_config` has an `importance_cap`, the batch gets `old_logprobs` from the policy: the loss "ppo" then clips
    the ratio to the policy before the step, and the cap bounds the ratio of that policy to the generator.
    """
    calls = [critic.forward(batch), reference.forward(batch)]
    if "old_logprobs" in get_loss("ppo", loss_config).required_inputs:
        calls.append(policy.forward(batch))
    judged, frozen, *old = await asyncio.gather(*calls)
    ready = with_inputs(batch, old_logprobs=old[0].logprobs) if old else batch
    return ready, judged.values, frozen.logprobs


def ppo_advantages(
    batch: Sequence[Datum], rewards: Sequence[float], values: Arrays | None, reference: Arrays, params: PPOParams
) -> tuple[list[Datum], dict[str, float]]:
    """Adds `advantages` (for loss "ppo"), `old_values` and `returns` (for loss "value") to the batch; also metrics.

    Every token has the reward -kl_coef * KL to the reference; a rollout's last token also has the rollout's reward.
    Advantages are normalised over the step. A truncated episode is treated as a finished one, because the environment
    gave it a reward. `values` and `reference` (log-probs) hold one [T] per datum. The explained variance compares the
    critic's values with the rewards-to-go. Raises ValueError if `values` is None, as from a trainer without value head.
    """
    if values is None:
        raise ValueError("there are no values; the critic must be a trainer with head='value'")
    generator_logprobs, reference_logprobs = sampled_logprobs(batch), gather_scored(batch, reference)
    old_values = gather_scored(batch, values)
    pairs = list(zip(generator_logprobs, reference_logprobs, strict=True))
    penalties = [kl_estimates(q, f, params.kl_estimator) for q, f in pairs]
    per_token = [token_rewards(reward, kl, params.kl_coef) for reward, kl in zip(rewards, penalties, strict=True)]
    estimates = [
        gae(token_reward, value, gamma=params.gamma, gae_lambda=params.gae_lambda)
        for token_reward, value in zip(per_token, old_values, strict=True)
    ]
    # With values of 0 and lambda 1, GAE's returns are the plain discounted sums of rewards.
    rewards_to_go = [gae(r, np.zeros(len(r)), gamma=params.gamma, gae_lambda=1.0)[1] for r in per_token]
    advantages = normalize([advantage for advantage, _ in estimates])
    ready = with_inputs(
        batch,
        advantages=[scatter_scored(datum, advantage) for datum, advantage in zip(batch, advantages, strict=True)],
        returns=[scatter_scored(datum, returns) for datum, (_, returns) in zip(batch, estimates, strict=True)],
        old_values=list(values),
    )
    return ready, {
        # k3 with any estimator of the penalty, so that runs with different penalties can be compared.
        "kl_reference": float(np.concatenate([kl_estimates(q, f, "k3") for q, f in pairs]).mean()),
        "value_mean": float(np.concatenate(old_values).mean()),
        "explained_variance": explained_variance(old_values, rewards_to_go),
    }


def minibatches(batch: Sequence[Datum], params: PPOParams, seed: Sequence[int]) -> list[list[Datum]]:
    """All minibatches of all epochs, each epoch in its own order, which `seed` decides.

    Neighbouring datums of the same prompt stay together, so that a minibatch computes their prompt once. The numbers of
    prompts in two minibatches of an epoch differ by at most one.
    """
    random = np.random.default_rng([*b"minibatches", *seed])
    groups = [list(group) for _, group in groupby(batch, key=lambda datum: shareable_prefix(datum).tobytes())]
    orders = [random.permutation(len(groups)) for _ in range(params.num_epochs)]
    count = min(params.minibatches_per_epoch, len(groups))
    parts = [part for order in orders for part in np.array_split(order, count)]
    return [[datum for i in part for datum in groups[i]] for part in parts]


def merge_minibatches(
    parts: Sequence[Sequence[Datum]], outputs: Sequence[tuple[ForwardBackwardOutput, ...]]
) -> tuple[list[Datum], ForwardBackwardOutput, dict[str, float]]:
    """A step's minibatches -> all their datums, the policy's outputs merged into one, and metrics.

    `outputs` holds the policy's and the critic's output for each minibatch. The metrics are both losses per token and
    the train-inference mismatch. Only the first minibatch counts for the mismatch: the later ones are scored by a
    policy that has been updated since it sampled them.
    """
    policy_output, critic_output = (merge_outputs(column) for column in zip(*outputs, strict=True))
    losses = {
        name: output.metrics["loss"] / (output.metrics["num_loss_tokens"] or 1)
        for name, output in (("loss", policy_output), ("critic_loss", critic_output))
    }
    return (
        [datum for part in parts for datum in part],
        policy_output,
        losses | logprob_mismatch(parts[0], outputs[0][0]),
    )
