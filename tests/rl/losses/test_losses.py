"""Every loss against its formula in NumPy; gradients are checked by finite differences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.losses import LOSSES, LossInputs, get_loss
from tests.rl.losses.cases import Array, one_datum, random_case, slopes


def _arrays(inputs: LossInputs) -> tuple[Array, Array, Array]:
    return inputs.weights.numpy(), inputs["logprobs"].numpy(), inputs["advantages"].numpy()


def _cross_entropy(p: Array, inputs: LossInputs) -> float:
    return float(-np.sum(inputs.weights.numpy() * p))


def _importance_sampling(p: Array, inputs: LossInputs) -> float:
    w, q, a = _arrays(inputs)
    return float(-np.sum(w * np.exp(p - q) * a))


def _ppo(p: Array, inputs: LossInputs, lo: float = 0.8, hi: float = 1.2) -> float:
    w, q, a = _arrays(inputs)
    total = 0.0
    for i in range(len(p)):
        r = np.exp(p[i] - q[i])
        total -= w[i] * min(r * a[i], min(max(r, lo), hi) * a[i])
    return float(total)


def _cispo(p: Array, inputs: LossInputs, frozen: Array | None = None, lo: float = 0.0, hi: float = 4.0) -> float:
    w, q, a = _arrays(inputs)
    r = np.exp((p if frozen is None else frozen) - q)
    return float(-np.sum(w * np.clip(r, lo, hi) * p * a))


def _dro(p: Array, inputs: LossInputs, beta: float = 0.05) -> float:
    w, q, a = _arrays(inputs)
    return float(-np.sum(w * (p * a - beta / 2 * (p - q) ** 2)))


def _gspo(p: Array, inputs: LossInputs, frozen: Array | None = None, lo: float = 0.9997, hi: float = 1.0004) -> float:
    w, q, a = _arrays(inputs)
    held = p if frozen is None else frozen
    total = 0.0
    for d in range(inputs.num_datums):
        rows = np.flatnonzero(inputs.datum_index.numpy() == d)
        s = np.exp(np.mean(held[rows] - q[rows]))
        for i in rows:
            s_t = s * np.exp(p[i] - held[i])
            total -= w[i] * min(s_t * a[i], np.clip(s_t, lo, hi) * a[i])
    return float(total)


def _value_loss(p: Array, inputs: LossInputs, clip: float = 0.2) -> float:
    w, old, target = (inputs[name].numpy() for name in ("weights", "old_values", "returns"))
    held = np.clip(p, old - clip, old + clip) if clip else p
    return float(0.5 * np.sum(w * np.maximum((p - target) ** 2, (held - target) ** 2)))


REFERENCES: dict[str, Callable[..., float]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "value": _value_loss,
}


def test_every_loss_has_a_reference() -> None:
    assert set(REFERENCES) == set(LOSSES)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient(name: str, seed: int) -> None:
    p, inputs = random_case(seed)
    logprobs = torch.from_numpy(p).requires_grad_()
    loss, _ = get_loss(name)(logprobs, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    reference = REFERENCES[name]
    assert loss.item() == pytest.approx(reference(p, inputs), rel=1e-12)

    # The part of a loss under a stop-gradient is held constant in the finite differences.
    held = {"frozen": p} if name in ("cispo", "gspo") else {}
    expected = slopes(lambda moved: reference(moved, inputs, **held), p)
    assert logprobs.grad.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_loss_is_a_sum_over_datums(lengths: list[int], seed: int) -> None:
    p, inputs = random_case(seed, tuple(lengths))
    for name in LOSSES:
        whole, _ = get_loss(name)(torch.from_numpy(p), None, inputs)
        parts = 0.0
        for d in range(len(lengths)):
            rows, part = one_datum(inputs, d)
            parts += get_loss(name)(torch.from_numpy(p)[rows], None, part)[0].item()
        assert whole.item() == pytest.approx(parts, rel=1e-9, abs=1e-9)


def test_dual_clip_bounds_the_loss_of_a_token_with_negative_advantage() -> None:
    p, inputs = random_case(size=200, spread=2.0)
    w, q, a = _arrays(inputs)
    logprobs = torch.tensor(p, requires_grad=True)
    loss, metrics = get_loss("ppo", {"dual_clip_threshold": 3.0})(logprobs, None, inputs)
    loss.backward()
    terms = np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.8, 1.2) * a)
    assert loss.item() == pytest.approx(-np.sum(w * np.where(a < 0, np.maximum(terms, 3 * a), terms)))
    beyond = (a < 0) & (np.exp(p - q) > 3)
    assert beyond.any()
    assert logprobs.grad is not None
    assert not logprobs.grad.numpy()[beyond].any()
    without = get_loss("ppo")(logprobs, None, inputs)[1]
    assert metrics["clipped_tokens"] == without["clipped_tokens"] + beyond.sum()


def test_gspo_takes_the_mean_over_the_tokens_of_its_mask() -> None:
    p, inputs = random_case(lengths=(4, 3, 5))
    mask = np.ones(len(p))
    mask[[0, 1, 5, 7, 11]] = 0
    masked = replace(inputs, arrays={**inputs.arrays, "sequence_ratio_mask": torch.from_numpy(mask)})
    w, q, a = _arrays(inputs)
    expected = 0.0
    for d in range(inputs.num_datums):
        rows = inputs.datum_index.numpy() == d
        s = np.exp((p - q)[rows & (mask != 0)].mean())
        expected -= np.sum((w * np.minimum(s * a, np.clip(s, 0.8, 1.2) * a))[rows])
    thresholds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    loss, _ = get_loss("gspo", thresholds)(torch.from_numpy(p), None, masked)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert loss.item() != get_loss("gspo", thresholds)(torch.from_numpy(p), None, inputs)[0].item()


def test_value_loss_without_clipping_is_half_the_squared_error() -> None:
    p, inputs = random_case()
    loss, metrics = get_loss("value", {"clip_range": 0})(torch.tensor(p), None, inputs)
    assert loss.item() == pytest.approx(_value_loss(p, inputs, clip=0))
    assert metrics["squared_error"].item() == pytest.approx(np.sum((p - inputs["returns"].numpy()) ** 2))
    assert "clipped_tokens" not in metrics


def test_a_clipped_value_is_not_rewarded_for_moving_further() -> None:
    _, inputs = random_case(size=1)
    inputs = replace(inputs, arrays={**inputs.arrays, "old_values": torch.zeros(1), "returns": torch.ones(1)})
    predicted = torch.tensor([0.5], requires_grad=True)
    loss, metrics = get_loss("value")(predicted, None, inputs)
    loss.backward()
    assert predicted.grad == 0
    assert metrics["clipped_tokens"] == 1


def test_options_change_the_clip() -> None:
    p, inputs = random_case()
    loss, metrics = get_loss("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0})(
        torch.tensor(p), None, inputs
    )
    assert loss.item() == pytest.approx(_ppo(p, inputs, 0.5, 3.0))
    tight = get_loss("ppo", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})(torch.tensor(p), None, inputs)[1]
    assert metrics["clipped_tokens"] < tight["clipped_tokens"]


def test_a_users_function_and_its_import_path_are_the_same_loss() -> None:
    p, inputs = random_case()
    by_value = get_loss(_half_square)(torch.tensor(p), torch.ones(len(p)), inputs)[0]
    by_path = get_loss("math:prod")
    assert by_value.item() == pytest.approx(0.5 * float(np.sum(p**2)) + len(p))
    assert by_path.needs_entropy
    assert get_loss(_half_square, {"scale": -2.0})(torch.tensor(p), torch.zeros(len(p)), inputs)[0] < 0


def _half_square(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs, *, scale: float = 1.0
) -> tuple[torch.Tensor, dict[str, Any]]:
    del inputs
    return scale * 0.5 * (logprobs**2).sum() + entropy.sum(), {}


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("pppo", {}, "'pppo', which is not known; did you mean 'ppo'"),
        ("ppo", {"clip_hi_threshold": 1.0}, "did you mean 'clip_high_threshold'"),
        ("ppo", {"clip_high_threshold": float("nan")}, "clip_high_threshold.*nan.*finite"),
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold.*at least 0"),
        ("ppo", {"clip_low_threshold": 1.3}, "must not exceed clip_high_threshold 1.2"),
        ("ppo", {"clip_low_threshold": "0.8"}, "clip_low_threshold.*'0.8'.*number"),
        ("ppo", {"clip_low_threshold": True}, "clip_low_threshold.*True.*number"),
        ("ppo", {"dual_clip_threshold": 1.1}, "dual_clip_threshold.*1.1.*at least clip_high_threshold 1.2"),
        ("cross_entropy", {"beta": 1.0}, "there are none"),
        ("no_such_module:loss", {}, "cannot be imported"),
        ("math:no_such_function", {}, "cannot be imported"),
    ],
)
def test_mistakes_are_named(loss: str, config: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_loss(loss, config)


def test_a_loss_that_is_not_a_sum_is_refused() -> None:
    p, inputs = random_case()

    def per_token(logprobs: torch.Tensor, entropy: Any, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        del entropy, inputs
        return logprobs, {}

    with pytest.raises(ValueError, match="must be a scalar sum"):
        get_loss(per_token)(torch.tensor(p), None, inputs)


def test_a_metric_with_a_name_of_the_trainers_is_refused() -> None:
    p, inputs = random_case()

    def proud(logprobs: torch.Tensor, entropy: Any, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        del entropy, inputs
        return logprobs.sum(), {"mine": logprobs.sum(), "loss": logprobs.sum()}

    with pytest.raises(ValueError, match="'proud' returned a metric 'loss', which the trainer reports; rename it"):
        get_loss(proud)(torch.tensor(p), None, inputs)
