"""Options that policy losses share: what is done to the generator's log-probs before, and what is added after.

Each acts on what goes into a loss or comes out of it, so that no loss knows of them. Legend: S scored positions; p =
the trainer's log-prob of the sampled token, with gradient; q = `logprobs`, the generator's; o = `old_logprobs`, the
trainer's when the token was sampled; f = `reference_logprobs`, a frozen model's; w = `weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from rl.checks import check_known
from rl.losses.inputs import LossInputs, Metrics

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
ImportanceMode = Literal["truncate", "mask"]
KL_OPTIONS = ("kl_coef", "kl_estimator")
ENTROPY_OPTIONS = ("entropy_coef",)
IMPORTANCE_OPTIONS = ("importance_cap", "importance_mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """All off by default. `Loss.with_options` has checked that numbers are finite and at least 0."""

    kl_coef: float = 0.0
    """Adds kl_coef * sum w k, where k estimates the KL of the policy from the reference; needs `reference_logprobs`."""
    kl_estimator: KLEstimator = "k3"
    """See `kl_terms`: which estimate, and which gradient it has."""
    entropy_coef: float = 0.0
    """Adds -entropy_coef * sum w H, with H the entropy of the next-token distribution: a bonus."""
    importance_cap: float = 0.0
    """Above 0, corrects the train-inference mismatch: each token's term is multiplied by a ratio that no gradient goes
    through, and the loss takes its own ratio to the trainer's policy instead of the generator's.

    With `old_logprobs`: the multiplier is exp(o - q), the loss's own ratio exp(p - o); the two factors of exp(p - q).
    Without: p stands in for o, so that the multiplier is exp(p - q) and the loss's own ratio is 1 and never clipped.
    That is LlamaRL's AIPO, https://arxiv.org/abs/2505.24034, and right where each token is trained on once; with
    several optimizer steps per rollout and a loss that clips, give `old_logprobs` (a `forward` before the first step).
    """
    importance_mode: ImportanceMode = "truncate"
    """What becomes of a multiplier above the cap. "truncate": the cap (TIS, https://fengyao.notion.site/off-policy-rl).
    "mask": 0, the token is left out; the metric `capped_tokens` says how many, for whoever averages over tokens."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, the value and what is accepted."""
        check_known("loss_config['kl_estimator']", self.kl_estimator, get_args(KLEstimator))
        check_known("loss_config['importance_mode']", self.importance_mode, get_args(ImportanceMode))
        if self.importance_mode == "mask" and self.importance_cap == 0:
            raise ValueError(
                "loss_config['importance_cap'] is 0, which switches the correction off; "
                "importance_mode 'mask' needs it above 0"
            )

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """What the options need beyond what the loss itself needs."""
        return ("reference_logprobs",) if self.kl_coef > 0 else ()

    @property
    def needs_entropy(self) -> bool:
        """Whether the trainer has to compute the entropy."""
        return self.entropy_coef > 0

    def apply(
        self,
        loss: Callable[[Tensor, Tensor | None, LossInputs], tuple[Tensor, Metrics]],
        logprobs: Tensor,
        entropy: Tensor | None,
        inputs: LossInputs,
    ) -> tuple[Tensor, Metrics]:
        """The loss with these options, and what a reader of the metrics wants to know of any policy loss.

        `kl_generator`: sum of k3 of the generator's policy from the trainer's; `ratio_max`: largest exp(p - q).
        `kl_reference`, `entropy` and `capped_tokens` where there is something to tell. Sums over the scored tokens.
        """
        metrics = _generator_metrics(logprobs.detach(), inputs["logprobs"])
        corrected = inputs
        if self.importance_cap > 0:
            corrected, metrics["capped_tokens"] = self._corrected(logprobs.detach(), inputs)
        total, own_metrics = loss(logprobs, entropy, corrected)
        if "reference_logprobs" in inputs.arrays:
            kl = kl_terms(logprobs, inputs["reference_logprobs"], self.kl_estimator)
            metrics["kl_reference"] = kl.sum()
            if self.kl_coef > 0:
                total = total + self.kl_coef * (inputs.weights * kl).sum()
        if entropy is not None:
            metrics["entropy"] = entropy.sum()
            if self.entropy_coef > 0:
                total = total - self.entropy_coef * (inputs.weights * entropy).sum()
        return total, {**metrics, **own_metrics}

    def _corrected(self, logprobs: Tensor, inputs: LossInputs) -> tuple[LossInputs, Tensor]:
        """Inputs with o in the place of q and the multiplier in the weights; the number of multipliers capped."""
        old = inputs.arrays.get("old_logprobs", logprobs)
        ratio = (old - inputs["logprobs"]).exp()
        capped = ratio > self.importance_cap
        multiplier = ratio.masked_fill(capped, self.importance_cap if self.importance_mode == "truncate" else 0.0)
        arrays = {**inputs.arrays, "logprobs": old, "weights": inputs.weights * multiplier}
        return replace(inputs, arrays=arrays), capped.sum()


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """[S] estimates of KL(policy || reference) at tokens that the policy sampled: http://joschu.net/blog/kl-approx.html.

    k1 = p - f: unbiased. Its gradient is that of p, 0 in expectation: it measures, and as a penalty only adds noise.
    k2 = (p - f)^2 / 2: biased but small. Its gradient is, in expectation, exactly that of KL(policy || reference); it
    equals that of a reward of -(p - f) per token.
    k3 = exp(f - p) - (f - p) - 1: unbiased, never negative, of low variance; GRPO's, eq. 4 of
    https://arxiv.org/abs/2402.03300. Its gradient is, in expectation, that of the reverse, KL(reference || policy).
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return (-log_ratio).exp() + log_ratio - 1


def _generator_metrics(logprobs: Tensor, generator: Tensor) -> Metrics:
    """How far the policy has moved from the generator's. The generator sampled the tokens, so k3 is of KL(q || p)."""
    largest = (logprobs - generator).exp().amax() if len(logprobs) else logprobs.new_zeros(())
    return {"kl_generator": kl_terms(generator, logprobs, "k3").sum(), "ratio_max": largest}
