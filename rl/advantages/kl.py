"""KL divergence between two policies, estimated from their log-probs of tokens that one of them sampled.

In NumPy, for rewards, metrics and decisions of the controller; `rl.losses.shared` has the same estimators with
gradients. Legend: T positions of a datum, N scored positions.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl.losses.shared import MAX_LOG_RATIO, KLEstimator
from rl.types import Datum

Array = NDArray[np.float64]


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


def kl_from_generator(batch: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> float:
    """KL(generator || policy) by k3, averaged over scored tokens. `logprobs` are the policy's, one [T] per datum."""
    pairs = zip(sampled_logprobs(batch), gather_scored(batch, logprobs), strict=True)
    return float(np.concatenate([kl_estimates(q, p, "k3") for q, p in pairs]).mean())
