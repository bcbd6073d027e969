"""Policy losses of recent papers, each a function of one page beside its citation.

`published.py` holds them, so that `--loss NAME` and `get_loss` find them. The legend is that of `functions.py`:
S scored positions, p, q, r = exp(p - q), A and w. W = exp(sum over the sequence of p - q) is the ratio of a whole
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rl.losses import Loss
from rl.losses.functions import gspo, ppo
from rl.losses.shared import (
    IMPORTANCE_OPTIONS,
    KL_OPTIONS,
    TERM_OPTIONS,
    LossFunction,
    LossInputs,
    Metrics,
    bounded_exp,
)
from rl.rollouts.episodes import with_inputs
from rl.types import Datum

if TYPE_CHECKING:
    from torch import Tensor

_CERTAIN = -1e-12
"""The largest log-prob for which a binary divergence is computed; log(1 - exp(p)) has no value at 0."""


def dppo_tv(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, divergence_threshold: float = 0.15
) -> tuple[Tensor, Metrics]:
    """-sum w m r A. m = 0 where the token's probability has moved too far: |exp(p) - exp(q)| > divergence_threshold.

    Only tokens that the gradient would move further away are left out: A > 0 with r > 1, and A < 0 with r < 1. DPPO
    with the binary total variation, eqs. 11 to 13 of https://arxiv.org/abs/2602.04879.
    """
    del entropy
    moved = (logprobs.detach().double().exp() - inputs["logprobs"].double().exp()).abs()
    return _within_divergence(logprobs, inputs, moved > divergence_threshold)


def dppo_kl(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, divergence_threshold: float = 0.05
) -> tuple[Tensor, Metrics]:
    """As `dppo_tv`, with the divergence KL(q || p) of the two events "this token" and "another one".

    exp(q) (q - p) + (1 - exp(q)) log((1 - exp(q)) / (1 - exp(p))): eq. 14 of https://arxiv.org/abs/2602.04879.
    """
    del entropy
    p, q = (array.double().clamp(max=_CERTAIN) for array in (logprobs.detach(), inputs["logprobs"]))
    others_p, others_q = -p.expm1(), -q.expm1()
    divergence = q.exp() * (q - p) + others_q * (others_q / others_p).log()
    return _within_divergence(logprobs, inputs, divergence > divergence_threshold)


def _within_divergence(logprobs: Tensor, inputs: LossInputs, far: Tensor) -> tuple[Tensor, Metrics]:
    """The terms of importance sampling, without tokens that are `far` [S] and would move further away."""
    log_ratio = logprobs.double() - inputs["logprobs"]
    return _without(far & (log_ratio.detach() * inputs["advantages"] > 0), log_ratio, inputs)


def _without(masked: Tensor, log_ratio: Tensor, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Importance sampling without the `masked` [S] tokens, whose gradient is 0."""
    terms = bounded_exp(log_ratio) * inputs["advantages"]
    return -(inputs.weights * terms.masked_fill(masked, 0.0)).sum(), {"clipped_tokens": masked.sum()}


def sapo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    positive_temperature: float = 1.0,
    negative_temperature: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """-sum w f(r) A with f(r) = 4 sigmoid(t (r - 1)) / t: a gate that closes smoothly, instead of a clip.

    t is `positive_temperature` where A > 0, else `negative_temperature`; at r = 1 the gradient is that of r A. Soft
    adaptive policy optimization, https://arxiv.org/abs/2511.20347.
    """
    del entropy
    ratio, advantages = bounded_exp(logprobs.double() - inputs["logprobs"]), inputs["advantages"]
    temperature = ratio.new_full(ratio.shape, negative_temperature).masked_fill(advantages > 0, positive_temperature)
    gate = 4 / temperature * (temperature * (ratio - 1)).sigmoid()
    return -(inputs.weights * gate * advantages).sum(), {}


def gmpo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.67,
    clip_high_threshold: float = 1.49,
) -> tuple[Tensor, Metrics]:
    """-sum w g A, where g is the geometric mean over the sequence of r, clipped as PPO does: on one side, by A's sign.

    The default range is the paper's exp(-0.4) and exp(0.4). Geometric-mean policy optimization, eq. 4 of
    https://arxiv.org/abs/2507.20673.
    """
    del entropy
    log_ratio, positive = logprobs.double() - inputs["logprobs"], inputs["advantages"] > 0
    high, low = np.log(max(clip_high_threshold, 1e-300)), np.log(max(clip_low_threshold, 1e-300))
    clipped = log_ratio.clamp(max=float(high)).where(positive, log_ratio.clamp(min=float(low)))
    ratio = bounded_exp(inputs.mean_per_datum(clipped)[inputs.datum_index])
    loss = -(inputs.weights * ratio * inputs["advantages"]).sum()
    return loss, {"clipped_tokens": (clipped != log_ratio).sum()}


def vespo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    positive_power: float = 2.0,
    positive_decay: float = 3.0,
    negative_power: float = 3.0,
    negative_decay: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """-sum w stop_grad(f(W)) p A with f(W) = W^k exp(c (1 - W)), which falls on both sides of W = k / c.

    k is `positive_power` where A > 0, else `negative_power`; c is the decay likewise. Variational sequence-level soft
    policy optimization, https://arxiv.org/abs/2602.10693.
    """
    del entropy
    advantages = inputs["advantages"]
    log_ratio = logprobs.detach().double() - inputs["logprobs"]
    of_sequence = inputs.sum_per_datum(log_ratio)[inputs.datum_index]
    negative, positive = (
        bounded_exp(power * of_sequence + decay * (1 - bounded_exp(of_sequence)))
        for power, decay in ((negative_power, negative_decay), (positive_power, positive_decay))
    )
    weight = positive.where(advantages > 0, negative)
    return -(inputs.weights * weight * logprobs * advantages).sum(), {"sequence_weight": weight.sum()}


def luspo(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 1 - 3e-4,
    clip_high_threshold: float = 1 + 4e-4,
) -> tuple[Tensor, Metrics]:
    """`gspo` with each sequence's term times its length, so that long answers are not discounted.

    `gspo` sums its terms over tokens, which is that product; so only the normaliser differs: one that no length enters.
    Length-unbiased sequence policy optimization, https://arxiv.org/abs/2602.05261.
    """
    return gspo(
        logprobs, entropy, inputs, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold
    )


def m2po(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, second_moment: float = 0.04
) -> tuple[Tensor, Metrics]:
    """-sum w m r A. m = 0 for the largest (p - q)^2, so many that the mean of the others is at most `second_moment`.

    Only tokens that move away from the generator's policy are counted and left out: A > 0 with r > 1, A < 0 with r < 1.
    Second-moment trust policy optimization, algorithm 1 of https://arxiv.org/abs/2510.01161. The paper bounds the
    moment over the batch; here it is bounded in each sequence, so that a result does not depend on how a batch is
    split. The bound over the batch follows.
    """
    del entropy
    log_ratio = logprobs.double() - inputs["logprobs"]
    square = (log_ratio.detach() ** 2).masked_fill(log_ratio.detach() * inputs["advantages"] <= 0, 0.0)
    masked = square < 0  # none
    for datum in range(inputs.num_datums):
        rows = ((inputs.datum_index == datum) & (square > 0)).nonzero().squeeze(1)
        ascending, order = square[rows].sort()
        means = ascending.cumsum(0) / ascending.new_ones(len(rows)).cumsum(0)
        masked[rows[order[means > second_moment]]] = True
    return _without(masked, log_ratio, inputs)


def kimi_k25(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 2.0,
    tau: float = 1e-3,
) -> tuple[Tensor, Metrics]:
    """-sum w (clip(r, low, high) A - tau (p - q)^2): a clipped token's advantage, of either sign, has no gradient.

    Eq. 1 of the Kimi K2.5 report, https://arxiv.org/abs/2602.02276, which does not give the values of the options.
    """
    del entropy
    log_ratio = logprobs.double() - inputs["logprobs"]
    ratio = bounded_exp(log_ratio)
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    loss = -(inputs.weights * (clipped * inputs["advantages"] - tau * log_ratio**2)).sum()
    return loss, {"clipped_tokens": (clipped != ratio).sum()}


def clip_cov(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: LossInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    selected_fraction: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> tuple[Tensor, Metrics]:
    """`ppo` without a few tokens that reduce the entropy most: tokens whose covariance of log-prob and A is large.

    `selected_fraction` of the batch's tokens are drawn at random from the tokens whose covariance, (q - mean)
    (A - mean), is between the two bounds. Clip-Cov, eqs. 10 and 11 of https://arxiv.org/abs/2505.22617. The controller
    draws them for the whole batch of a call, from q; the paper takes p, which is the same before a step's first update.
    As in the authors' code it draws one token at least, if there is a candidate; `selected_tokens` says how many.
    """
    del selected_fraction, covariance_low, covariance_high  # `select_for_clip_cov` has used them
    selected = inputs[_SELECTED]
    kept = replace(inputs, arrays={**inputs.arrays, "weights": inputs.weights * (1 - selected)})
    thresholds = {"clip_low_threshold": clip_low_threshold, "clip_high_threshold": clip_high_threshold}
    loss, metrics = ppo(logprobs, entropy, kept, **thresholds)
    return loss, {**metrics, "selected_tokens": selected.sum()}


def kl_cov(
    logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs, *, selected_fraction: float = 2e-3, beta: float = 1.0
) -> tuple[Tensor, Metrics]:
    """-sum w (r A - s beta |p - q|), where s = 1 for the tokens with the largest covariance of log-prob and A.

    `selected_fraction` of the batch's tokens are selected, by the largest (q - mean) (A - mean). KL-Cov, eqs. 12 and 13
    of https://arxiv.org/abs/2505.22617. At p = q the penalty has no gradient, so it acts when a batch is used twice, or
    under a lag. As in `clip_cov`, the controller selects for the whole batch of a call.
    """
    del entropy, selected_fraction  # `select_for_kl_cov` has used it
    log_ratio = logprobs.double() - inputs["logprobs"]
    penalty = beta * inputs[_SELECTED] * log_ratio.abs()
    loss = -(inputs.weights * (bounded_exp(log_ratio) * inputs["advantages"] - penalty)).sum()
    return loss, {"selected_tokens": inputs[_SELECTED].sum()}


_SELECTED = "selected"
"""The loss input that the two functions below add: 1 for a selected token, else 0."""


def select_for_clip_cov(batch: Sequence[Datum], options: Mapping[str, Any]) -> list[Datum]:
    """The batch with the input `selected`, as `clip_cov` describes. The same batch gets the same draw."""
    covariance = _covariance(batch)
    (candidates,) = np.nonzero((covariance >= options["covariance_low"]) & (covariance <= options["covariance_high"]))
    count = min(max(int(options["selected_fraction"] * len(covariance)), 1), len(candidates))
    draw = np.random.default_rng([*b"clip_cov", len(covariance), len(candidates)])
    return _with_selected(batch, draw.choice(candidates, count, replace=False))


def select_for_kl_cov(batch: Sequence[Datum], options: Mapping[str, Any]) -> list[Datum]:
    """The batch with the input `selected`: 1 for the tokens of the largest covariance, and 1 token at least."""
    covariance = _covariance(batch)
    count = min(max(int(options["selected_fraction"] * len(covariance)), 1), len(covariance))
    return _with_selected(batch, np.argsort(-covariance, kind="stable")[:count])


def _covariance(batch: Sequence[Datum]) -> NDArray[np.float64]:
    """[N] (q - mean) (A - mean) of all scored tokens of a batch."""
    q, advantages = (
        np.concatenate([datum.loss_inputs[name][datum.counted] for datum in batch]).astype(np.float64)
        for name in ("logprobs", "advantages")
    )
    return (q - q.mean()) * (advantages - advantages.mean()) if len(q) else q


def _with_selected(batch: Sequence[Datum], selected: NDArray[np.int64]) -> list[Datum]:
    """The batch with the input `selected`; the numbers count the batch's scored tokens."""
    marks = np.zeros(sum(datum.num_loss_tokens for datum in batch), dtype=np.float32)
    marks[selected] = 1
    arrays: list[NDArray[np.float32]] = []
    for datum, part in zip(batch, np.split(marks, np.cumsum([d.num_loss_tokens for d in batch])[:-1]), strict=True):
        arrays.append(np.zeros(len(datum.tokens), dtype=np.float32))
        arrays[-1][datum.counted] = part
    return with_inputs(batch, **{_SELECTED: arrays})


def reverse_kl(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """sum w (exp(p) (p - f) - exp(p) + exp(f)): KL(student || teacher), with f = `teacher_logprobs`.

    A position has a datum for each of its tokens. No token's term is negative; over all tokens the last two cancel, and
    the sum is the KL divergence. Over some, as the most probable ones, it is a lower bound, which is 0 where p = f.
    On-policy distillation, eq. 3 of GKD, https://arxiv.org/abs/2306.13649; the loop `distill` makes such a batch.
    """
    del entropy
    p, f = _student_and_teacher(logprobs, inputs)
    return (inputs.weights * (p.exp() * (p - f) - p.exp() + f.exp())).sum(), {}


def forward_kl(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """sum w (exp(f) (f - p) - exp(f) + exp(p)): KL(teacher || student). Tokens and bound are as in `reverse_kl`."""
    del entropy
    p, f = _student_and_teacher(logprobs, inputs)
    return (inputs.weights * (f.exp() * (f - p) - f.exp() + p.exp())).sum(), {}


def jensen_shannon(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """sum w/2 (exp(p) (p - m) + exp(f) (f - m)), with m = log((exp(p) + exp(f)) / 2): between the two directions.

    Tokens and bound are as in `reverse_kl`. Eq. 1 of GKD, https://arxiv.org/abs/2306.13649, with its beta at 1/2.
    """
    del entropy
    p, f = _student_and_teacher(logprobs, inputs)
    middle = p.logaddexp(f) - math.log(2)
    return 0.5 * (inputs.weights * (p.exp() * (p - middle) + f.exp() * (f - middle))).sum(), {}


def _student_and_teacher(logprobs: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """[S] log-probs in float64; rounding may put one above 0."""
    return logprobs.double().clamp(max=0.0), inputs["teacher_logprobs"].double().clamp(max=0.0)


_POLICY = (*KL_OPTIONS, *TERM_OPTIONS, *IMPORTANCE_OPTIONS)


def _policy_loss(function: LossFunction, **fields: Any) -> Loss:
    return Loss(
        name=function.__name__,
        function=function,
        required_inputs=("logprobs", "advantages"),
        takes=_POLICY,
        clips=True,
        **fields,
    )


LOSSES: Mapping[str, Loss] = {
    function.__name__: _policy_loss(function) for function in (dppo_tv, dppo_kl, vespo, m2po, kimi_k25)
} | {
    "sapo": _policy_loss(sapo, normaliser="sequences"),
    "gmpo": _policy_loss(gmpo, normaliser="sequences"),
    "luspo": _policy_loss(luspo, normaliser="constant"),
    "clip_cov": _policy_loss(clip_cov, prepare=select_for_clip_cov),
    "kl_cov": _policy_loss(kl_cov, prepare=select_for_kl_cov),
    **{
        function.__name__: Loss(name=function.__name__, function=function, required_inputs=("teacher_logprobs",))
        for function in (reverse_kl, forward_kl, jensen_shannon)
    },
}
"""The losses of this file by name."""
