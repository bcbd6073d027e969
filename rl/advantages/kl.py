"""How far apart two policies are, by their log-probs of the tokens that one of them sampled.

NumPy twins of what `rl.losses.shared` computes with gradients, for rewards, metrics and decisions of the controller.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl.losses.shared import KLEstimator
from rl.types import Datum

Array = NDArray[np.float64]


def kl_estimates(generator: NDArray[np.floating], other: NDArray[np.floating], estimator: KLEstimator) -> Array:
    """[N] estimates, token by token, of KL(generator || other): k1, k2 or k3 of http://joschu.net/blog/kl-approx.html.

    All are of the policy that sampled the tokens, from the other. k1, the difference, is what a penalty in the reward
    is made of; k3 is never negative and of low variance, which suits a measurement.
    """
    log_ratio = np.asarray(generator, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return np.exp(-log_ratio) + log_ratio - 1


def sampled_logprobs(batch: Sequence[Datum]) -> list[NDArray[np.float32]]:
    """One [N] per datum: the generator's log-probs of the scored tokens."""
    return at_scored(batch, [datum.loss_inputs["logprobs"] for datum in batch])


def at_scored(batch: Sequence[Datum], arrays: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """One [T] per datum -> one [N]: its values at the scored positions."""
    return [array[datum.weights != 0] for datum, array in zip(batch, arrays, strict=True)]


def to_positions(datum: Datum, values: NDArray[np.floating]) -> NDArray[np.float32]:
    """[N] values of the scored positions -> [T], 0 elsewhere."""
    array = np.zeros(len(datum.tokens), dtype=np.float32)
    array[datum.weights != 0] = values
    return array


def kl_from_generator(batch: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> float:
    """Mean over the scored tokens of k3 of KL(generator || policy), with the policy's log-probs, one [T] per datum."""
    pairs = zip(sampled_logprobs(batch), at_scored(batch, logprobs), strict=True)
    return float(np.concatenate([kl_estimates(generator, policy, "k3") for generator, policy in pairs]).mean())
