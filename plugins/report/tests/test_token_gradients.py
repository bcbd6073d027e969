"""Shares of tokens in a step's gradient are those of the formulas of the losses."""

from typing import Any

import numpy as np
import pytest

from ownloop_report.token_gradients import token_gradients
from rl.tiny_models import random_batch

BATCH = random_batch((7, 12, 9))
LOGPROBS = [
    (datum.loss_inputs["logprobs"] + np.random.default_rng(n).normal(0, 0.4, len(datum.tokens))).astype(np.float32)
    for n, datum in enumerate(BATCH)
]


def _by_hand(name: str, per_sequence: bool) -> tuple[list[Any], list[Any]]:
    """-dL/dp and clipped, of each datum, from the formulas."""
    derivatives, clipped = [], []
    for datum, p in zip(BATCH, LOGPROBS, strict=True):
        a, w = datum.loss_inputs["advantages"], datum.weights / (np.count_nonzero(datum.weights) if per_sequence else 1)
        ratio = np.exp(p.astype(float) - datum.loss_inputs["logprobs"])
        if name == "cispo":
            is_clipped, factor = ratio > 1.2, np.minimum(ratio, 1.2)
        else:
            is_clipped = np.where(a > 0, ratio > 1.2, ratio < 0.8) if name == "ppo" else ratio < 0
            factor = np.where(is_clipped, 0, ratio)
        derivatives.append(w * factor * a)
        clipped.append(is_clipped & (w != 0))
    return derivatives, clipped


@pytest.mark.parametrize("normaliser", ["tokens", "sequences"])
@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_shares_are_those_of_the_formula(name: str, normaliser: str) -> None:
    options = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.2} if name == "cispo" else {}
    config = {"loss": name, "loss_config": options, "normaliser": normaliser}
    derivatives, clipped = _by_hand(name, normaliser == "sequences")
    total = sum(np.abs(each).sum() for each in derivatives)
    found = token_gradients(BATCH, LOGPROBS, config)
    assert found is not None
    for (share, is_clipped), expected, cut in zip(found, derivatives, clipped, strict=True):
        np.testing.assert_allclose(share, expected / total, rtol=1e-4, atol=1e-9)
        assert is_clipped.tolist() == cut.tolist()
    assert sum(np.abs(share).sum() for share, _ in found) == pytest.approx(1)
    assert any(cut.any() for cut in clipped) == (name != "importance_sampling")


@pytest.mark.parametrize("config", [{}, {"loss": "mine:loss"}, {"loss": "clip_cov"}, {"loss": "value"}])
def test_what_the_loss_does_not_tell_is_not_guessed(config: dict[str, Any]) -> None:
    assert token_gradients(BATCH, LOGPROBS, config) is None
