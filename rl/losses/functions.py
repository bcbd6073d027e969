"""The loss functions: terms per token, summed.

Legend: S scored positions; p = the trainer's log-prob of the sampled token, or of the target token; q = the
generator's, the input `logprobs`; r = exp(p - q), the importance ratio, bounded by `bounded_exp`; A = `advantages`; w =
`weights`. Clip thresholds are absolute bounds on r, as in Tinker: PPO's epsilon = 0.2 is 0.8 and 1.2. The options that
the policy losses share are in `shared.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.losses.shared import LossInputs, Metrics, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-sum w p. Weights may be negative or tiny; they are used exactly as given, which DPO relies on."""
    del entropy
    return -(inputs.weights * logprobs).sum(), {}


def importance_sampling(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-sum w r A: the off-policy policy gradient. At r = 1 its gradient is that of REINFORCE."""
    del entropy
    ratio = bounded_exp(logprobs.double() - inputs["logprobs"])
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
    A `dual_clip_threshold` c > 0 bounds the term of a token with negative advantage by c |A|, with no gradient beyond,
    however large the ratio: dual-clip PPO (https://arxiv.org/abs/1912.09729), which uses c = 3.
    """
    del entropy
    ratio = bounded_exp(logprobs.double() - inputs["logprobs"])
    return _clipped(ratio, inputs, clip_low_threshold, clip_high_threshold, dual_clip_threshold)


def cispo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 4.0,
) -> tuple[Tensor, Metrics]:
    """-sum w stop_grad(clip(r, low, high)) p A: clips the importance weight, so every token keeps a gradient.

    MiniMax-M1, eq. 4 of https://arxiv.org/abs/2506.13585. Its anchor, the policy under the ratio, is the generator's;
    with `importance_cap` it is the trainer's old policy, and the gap between the two is corrected apart from the clip.
    """
    del entropy
    ratio = bounded_exp(logprobs.detach().double() - inputs["logprobs"])
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    loss = -(inputs.weights * clipped * logprobs * inputs["advantages"]).sum()
    return loss, {"clipped_tokens": (clipped != ratio).sum()}


def dro(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, beta: float = 0.05) -> tuple[Tensor, Metrics]:
    """-sum w (p A - beta/2 (p - q)^2): direct reward optimisation (https://arxiv.org/abs/2405.19107), per token.

    The quadratic term, instead of a clip, keeps the policy near the generator's.
    """
    del entropy
    p = logprobs.double()  # float32 does not hold the squares of large numbers
    return -(inputs.weights * (p * inputs["advantages"] - 0.5 * beta * (p - inputs["logprobs"]) ** 2)).sum(), {}


def gspo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 1 - 3e-4,
    clip_high_threshold: float = 1 + 4e-4,
) -> tuple[Tensor, Metrics]:
    """-sum w min(s_t A, clip(s_t, low, high) A): all tokens of a sequence have the sequence's importance ratio.

    s = exp(mean over the sequence of p - q). s_t = stop_grad(s) exp(p - stop_grad(p)) has the value s and the gradient
    of its own token: GSPO-token, eqs. 7 and 13 of https://arxiv.org/abs/2507.18071. The default clip range is the
    paper's. With the input `sequence_ratio_mask`, only positions where it is not 0 enter the mean.
    """
    del entropy
    log_ratio = logprobs.detach().double() - inputs["logprobs"]
    mask = inputs.arrays.get("sequence_ratio_mask")
    of_sequence = inputs.mean_per_datum(log_ratio, mask)[inputs.datum_index]
    # The difference is 0: it adds nothing but the gradient.
    ratio = bounded_exp(of_sequence + (logprobs - logprobs.detach()))
    return _clipped(ratio, inputs, clip_low_threshold, clip_high_threshold)


def _clipped(ratio: Tensor, inputs: LossInputs, low: float, high: float, dual: float = 0.0) -> tuple[Tensor, Metrics]:
    """PPO's pessimistic minimum of clipped and unclipped terms; `clipped_tokens` counts terms without gradient."""
    advantages = inputs["advantages"]
    unclipped_terms, clipped_terms = ratio * advantages, ratio.clamp(low, high) * advantages
    terms, is_clipped = unclipped_terms.minimum(clipped_terms), clipped_terms < unclipped_terms
    if dual > 0:
        floor = dual * advantages
        below_floor = (advantages < 0) & (terms < floor)
        terms, is_clipped = terms.where(~below_floor, floor), is_clipped | below_floor
    return -(inputs.weights * terms).sum(), {"clipped_tokens": is_clipped.sum()}


def value(
    values: Tensor, entropy: Tensor | None, inputs: LossInputs, *, clip_range: float = 0.2
) -> tuple[Tensor, Metrics]:
    """sum w/2 max((V - R)^2, (clip(V, v - clip_range, v + clip_range) - R)^2), with R = `returns`, v = `old_values`.

    `values` [S] is V, the head's output. `old_values` is its output before the step, and `returns` comes from
    `rl.advantages.gae`. This is PPO's clipped value loss as in OpenAI baselines' `ppo2`
    (https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/, detail 9): V gains nothing by
    moving more than `clip_range` towards the returns in one step. 0 switches clipping off.
    """
    del entropy
    values, returns, old_values = values.double(), inputs["returns"], inputs["old_values"]
    error = (values - returns) ** 2
    metrics = {"squared_error": error.sum()}
    if clip_range > 0:
        clipped = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns) ** 2
        metrics["clipped_tokens"] = (clipped > error).sum()
        error = error.maximum(clipped)
    return 0.5 * (inputs.weights * error).sum(), metrics
