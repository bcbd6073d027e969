"""Policy-gradient losses, per token and summed.

Legend: S scored positions; p = the trainer's log-prob of the sampled token, q = `logprobs`, the generator's,
r = exp(p - q) the importance ratio, A = `advantages`, w = `weights`. Clip thresholds are absolute bounds on r, as in
Tinker: PPO's epsilon = 0.2 is 0.8 and 1.2. Options that all of these share are in `shared.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.losses.inputs import LossInputs, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def importance_sampling(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-sum w r A: the off-policy policy gradient; at r = 1 its gradient is REINFORCE's."""
    del entropy
    ratio = (logprobs - inputs["logprobs"]).exp()
    return -(inputs.weights * ratio * inputs["advantages"]).sum(), {}


def ppo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip_threshold: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """-sum w min(r A, clip(r, low, high) A): PPO's clipped surrogate, eq. 7 of https://arxiv.org/abs/1707.06347.

    A `clip_high_threshold` further from 1 than the low one is DAPO's clip-higher (https://arxiv.org/abs/2503.14476).
    With a `dual_clip_threshold` c, a token of negative advantage loses at most c |A|, however large its ratio, and no
    gradient beyond: dual-clip PPO (https://arxiv.org/abs/1912.09729), where c is 3.
    """
    del entropy
    ratio = (logprobs - inputs["logprobs"]).exp()
    return _clipped(ratio, inputs, clip_low_threshold, clip_high_threshold, dual_clip_threshold)


def cispo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> tuple[Tensor, Metrics]:
    """-sum w stop_grad(clip(r, low, high)) p A: clips the importance weight, so that no token's gradient is dropped.

    MiniMax-M1, eq. 4 of https://arxiv.org/abs/2506.13585.
    """
    del entropy
    ratio = (logprobs - inputs["logprobs"]).exp().detach()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    loss = -(inputs.weights * clipped * logprobs * inputs["advantages"]).sum()
    return loss, {"clipped_tokens": (clipped != ratio).sum()}


def dro(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, beta: float = 0.05) -> tuple[Tensor, Metrics]:
    """-sum w (p A - beta/2 (p - q)^2): direct reward optimisation (https://arxiv.org/abs/2405.19107), per token.

    The quadratic term keeps the policy near the generator without a clip.
    """
    del entropy
    log_ratio = logprobs - inputs["logprobs"]
    return -(inputs.weights * (logprobs * inputs["advantages"] - 0.5 * beta * log_ratio**2)).sum(), {}


def gspo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 1 - 3e-4,
    clip_high_threshold: float = 1 + 4e-4,
) -> tuple[Tensor, Metrics]:
    """-sum w min(s_t A, clip(s_t, low, high) A): the sequence's ratio, clipped as one.

    s = exp(mean over the sequence of p - q), and s_t = stop_grad(s) exp(p - stop_grad(p)) carries the gradient of each
    token: GSPO-token, eqs. 7 and 13 of https://arxiv.org/abs/2507.18071, with that paper's clip range as default.
    """
    del entropy
    log_ratio = logprobs.detach() - inputs["logprobs"]
    sequence_ratio = inputs.mean_per_datum(log_ratio).exp()[inputs.datum_index]
    ratio = sequence_ratio * (logprobs - logprobs.detach()).exp()
    return _clipped(ratio, inputs, clip_low_threshold, clip_high_threshold)


def _clipped(ratio: Tensor, inputs: LossInputs, low: float, high: float, dual: float = 0.0) -> tuple[Tensor, Metrics]:
    """The pessimistic minimum of the ratio's term and the clipped ratio's, and how many tokens it stopped."""
    advantages = inputs["advantages"]
    unclipped, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    terms, stopped = unclipped.minimum(clipped), clipped < unclipped
    if dual > 0:
        floor = dual * advantages
        beyond = (advantages < 0) & (terms < floor)
        terms, stopped = terms.where(~beyond, floor), stopped | beyond
    return -(inputs.weights * terms).sum(), {"clipped_tokens": stopped.sum()}
