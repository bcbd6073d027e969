"""Cross-entropy on given target tokens. Legend: p = the trainer's log-prob of the target token, w = `weights`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.losses.inputs import LossInputs, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-sum w p. Weights may be negative or tiny; they are used exactly as given, which DPO relies on."""
    del entropy
    return -(inputs.weights * logprobs).sum(), {}
