"""Losses on given target tokens. Legend: S scored positions; p the model's log-prob of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl.losses.inputs import LossInputs, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """-sum w * p. Weights may be negative or tiny and are used exactly as given."""
    del entropy
    return -(inputs.weights * logprobs).sum(), {}
