"""The inputs of a loss, and the options that policy losses share: importance correction, KL, entropy, observations.

The options change a loss's inputs or add to its result, so that no loss needs to know them. Legend: S scored positions;
p = the trainer's log-prob of the sampled token, with gradient; q = the generator's, the input `logprobs`; o = the
trainer's when the token was sampled, `old_logprobs`; f = a frozen reference model's, `reference_logprobs`; w =
`weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rl.configuration import NotNegative
from rl.types import Datum

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
ImportanceMode = Literal["truncate", "mask"]
ImportanceLevel = Literal["token", "sequence", "geometric"]
KL_OPTIONS = ("kl_coef", "kl_estimator")
TERM_OPTIONS = ("entropy_coef", "observation_coef")
IMPORTANCE_OPTIONS = (
    *("importance_cap", "importance_floor", "importance_mode", "importance_level"),
    "off_policy_sequence_threshold",
)
MAX_LOG_RATIO = math.log(np.finfo(np.float32).max)
"""The bound of log-ratios that are exponentiated."""
Metrics = dict[str, "Tensor"]
LossFunction = Callable[..., tuple["Tensor", Metrics]]
"""(logprobs or values [S], entropy [S] or None, inputs, *, options) -> (loss sum, metric sums).

Options are keyword-only parameters with defaults. A run reports every metric: one whose name ends in `_max` or `_min`
is merged over micro-batches by maximum or minimum, all others are summed, and the sums are divided by the number of
scored tokens unless the name ends in `_sum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The scored positions of one micro-batch, concatenated over its datums. Legend: S scored positions, D datums."""

    arrays: Mapping[str, Tensor]
    """Name -> [S]. Always holds `weights` and `target_tokens`."""
    datum_index: Tensor
    """[S] int64 in 0..D-1: the datum of the micro-batch that a position belongs to."""
    num_datums: int
    """D. It cannot be read off `datum_index`: a datum without a scored position does not occur there."""

    def __getitem__(self, name: str) -> Tensor:
        """[S] the array of this name. Raises KeyError if the datums do not have it."""
        return self.arrays[name]

    @property
    def weights(self) -> Tensor:
        """[S] the factor of each position's term in the loss."""
        return self.arrays["weights"]

    def counted(self) -> tuple[Tensor, LossInputs]:
        """[C] indices of the positions that count, and their inputs. The others are only reported."""
        rows = self.weights.nonzero().squeeze(1)
        return rows, self.of(rows)

    def of(self, rows: Tensor) -> LossInputs:
        """The inputs at the positions [C] with these indices."""
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return replace(self, arrays=arrays, datum_index=self.datum_index[rows])

    def mean_per_datum(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """[D] mean of `values` [S] over each datum's scored positions; 0 for a datum without scored positions.

        With a `mask` [S], only positions where it is not 0 count.
        """
        counted = values.new_ones(len(values)) if mask is None else (mask != 0).to(values.dtype)
        return self.sum_per_datum(values * counted) / self.sum_per_datum(counted).clamp(min=1)

    def sum_per_datum(self, values: Tensor) -> Tensor:
        """[D] sum of `values` [S] over each datum's scored positions."""
        return values.new_zeros(self.num_datums).index_add(0, self.datum_index, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """All are off by default. `Loss.with_options` checks their types."""

    kl_coef: NotNegative = 0.0
    """Adds kl_coef * sum w k, where k estimates KL(policy || reference). Needs the input `reference_logprobs`."""
    kl_estimator: KLEstimator = "k3"
    """The estimator k. `kl_terms` explains the value and the gradient of each."""
    entropy_coef: NotNegative = 0.0
    """Entropy bonus: adds -entropy_coef * sum w H, where H is the entropy of the next-token distribution."""
    observation_coef: NotNegative = 0.0
    """Adds -observation_coef * sum p over observations, the tokens between the sampled ones of a datum: in episodes of
    several turns the policy also learns what its environment says. Known as ECHO."""
    importance_cap: NotNegative = 0.0
    """Above 0, corrects the train-inference mismatch: each token's term is multiplied by an importance ratio without
    gradient, and the loss computes its own ratio to the trainer's old policy instead of the generator's.

    With `old_logprobs`, exp(p - q) is split in two: the multiplier is exp(o - q), and the loss's own ratio exp(p - o).
    Without, p takes the place of o: the multiplier is exp(p - q), and the loss's own ratio is 1. That is LlamaRL's
    AIPO, https://arxiv.org/abs/2505.24034. It is right for a loss that does not clip, if each token is trained on once.
    A loss that clips needs `old_logprobs`, from a `forward` before the first optimizer step.
    """
    importance_floor: NotNegative = 0.0
    """The smallest multiplier, as `importance_cap` is the largest one."""
    importance_mode: ImportanceMode = "truncate"
    """What happens to a multiplier outside the range. "truncate" sets it to the nearest bound (TIS,
    https://fengyao.notion.site/off-policy-rl). "mask" sets it to 0, which leaves the token out (MIS; with a floor,
    IcePop, https://arxiv.org/abs/2510.18855); subtract the metric `capped_tokens` for a mean over the tokens left."""
    importance_level: ImportanceLevel = "token"
    """What the multiplier is the ratio of: "token"; "sequence", the product of its tokens' ratios, which every token of
    the sequence gets; "geometric", their geometric mean, which with "mask" is a rejection of whole sequences."""
    off_policy_sequence_threshold: NotNegative = 0.0
    """Above 0, leaves out the tokens with a negative advantage of a sequence whose mean of q - p is above it: the
    off-policy sequence mask of DeepSeek-V3.2, eq. 9 of https://arxiv.org/abs/2512.02556."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, the value and what is accepted."""
        if self.importance_cap == 0:
            for name, default in (
                ("importance_mode", "truncate"),
                ("importance_level", "token"),
                ("importance_floor", 0),
            ):
                if (value := getattr(self, name)) != default:
                    raise ValueError(
                        "loss_config['importance_cap'] is 0, which switches the correction off; "
                        f"{name} {value!r} needs it above 0"
                    )
        elif self.importance_floor > self.importance_cap:
            raise ValueError(
                f"loss_config['importance_floor'] is {self.importance_floor}; it must not exceed importance_cap "
                f"{self.importance_cap}"
            )

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """Loss inputs that the options need, beyond what the loss itself needs."""
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
        """Evaluates the loss with these options and adds metrics that every policy loss has.

        `kl_generator`, KL(generator || trainer) by k3, and `ratio_max`, the largest exp(p - q), are always there;
        `kl_reference`, `entropy`, `capped_tokens` and `off_policy_tokens` if they were computed. All but the maximum
        are sums over the scored tokens.
        """
        metrics = _generator_metrics(logprobs.detach(), inputs)
        corrected = inputs
        if self.off_policy_sequence_threshold > 0:
            corrected, metrics["off_policy_tokens"] = self._without_off_policy(logprobs.detach(), corrected)
        if self.importance_cap > 0:
            corrected, metrics["capped_tokens"] = self._corrected(logprobs.detach(), corrected)
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

    def of_observations(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """The sum of -p over observations, which `with_observations` has marked."""
        return -(logprobs * inputs["observations"]).sum()

    def _corrected(self, logprobs: Tensor, inputs: LossInputs) -> tuple[LossInputs, Tensor]:
        """The inputs with o in place of q and the multiplier in the weights; also the number of capped multipliers."""
        old = inputs.arrays.get("old_logprobs", logprobs)
        log_ratio = old.double() - inputs["logprobs"]  # no gradient: `logprobs` is detached
        if self.importance_level != "token":
            merge = inputs.sum_per_datum if self.importance_level == "sequence" else inputs.mean_per_datum
            log_ratio = merge(log_ratio)[inputs.datum_index]
        ratio = bounded_exp(log_ratio)
        multiplier = ratio.clamp(self.importance_floor, self.importance_cap)
        capped = multiplier != ratio
        if self.importance_mode == "mask":
            multiplier = multiplier.masked_fill(capped, 0.0)
        arrays = {**inputs.arrays, "logprobs": old, "weights": inputs.weights * multiplier}
        return replace(inputs, arrays=arrays), capped.sum()

    def _without_off_policy(self, logprobs: Tensor, inputs: LossInputs) -> tuple[LossInputs, Tensor]:
        """The inputs with the weights that `off_policy_sequence_threshold` leaves out at 0; also their number."""
        distance = inputs.mean_per_datum(inputs["logprobs"].double() - logprobs)[inputs.datum_index]
        left_out = (distance > self.off_policy_sequence_threshold) & (inputs["advantages"] < 0)
        arrays = {**inputs.arrays, "weights": inputs.weights.masked_fill(left_out, 0.0)}
        return replace(inputs, arrays=arrays), left_out.sum()


def with_observations(batch: Sequence[Datum]) -> list[Datum]:
    """The batch with the input `observations`: 1 for tokens that were not sampled, after the first that was.

    They are only reported, so they count in no other sum and in no number of tokens.
    """
    marked: list[Datum] = []
    for datum in batch:
        sampled = np.flatnonzero(datum.counted)
        observed = ~datum.counted
        observed[: sampled[0] if len(sampled) else None] = False
        observed[sampled[-1] if len(sampled) else 0 :] = False
        inputs = {"reported_mask": datum.scored | observed, "observations": observed.astype(np.float32)}
        marked.append(replace(datum, loss_inputs={**datum.loss_inputs, **inputs}))
    return marked


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of float64 log-ratios, bounded by float32's largest number, beyond which the gradient is 0.

    An infinite ratio would become NaN in the product with an advantage, a weight or a clip's gradient of 0. Products of
    a bounded ratio are finite, too, because float64 holds numbers far beyond it.
    """
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def kl_terms(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """[S] estimates of KL(policy || reference) at tokens that the policy sampled: http://joschu.net/blog/kl-approx.html.

    k1 = p - f is unbiased. Its gradient is that of p, which is 0 in expectation: as a penalty in the loss it only adds
    noise.
    k2 = (p - f)^2 / 2 has a small bias. Its expected gradient is exactly that of KL(policy || reference), the same as
    that of a reward of -(p - f) per token.
    k3 = exp(f - p) - (f - p) - 1 is unbiased, never negative and of low variance. It is GRPO's, eq. 4 of
    https://arxiv.org/abs/2402.03300. Its expected gradient is that of the other direction, KL(reference || policy).
    f - p is bounded as in `bounded_exp`.
    """
    log_ratio = logprobs.double() - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    bounded = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return bounded.expm1() - bounded


def _generator_metrics(logprobs: Tensor, inputs: LossInputs) -> Metrics:
    """How far the trainer's policy is from the generator's, at the tokens that the generator sampled."""
    generator = inputs["logprobs"]
    ratio = bounded_exp(logprobs.double() - generator)
    largest = ratio.amax() if len(ratio) else logprobs.new_zeros(())
    # The generator sampled the tokens, so they estimate KL(generator || trainer) and not the other direction.
    return {"kl_generator": kl_terms(generator, logprobs, "k3").sum(), "ratio_max": largest}
