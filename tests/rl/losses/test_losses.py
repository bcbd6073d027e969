"""Every loss against its formula in NumPy; gradients are checked by finite differences."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.losses import LOSSES, LossInputs, get_loss, option_defaults
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


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
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
        ("ppo", {"clip_low_threshold": -0.1}, "clip_low_threshold.* is -0.1"),
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


@pytest.mark.parametrize(
    ("name", "inputs", "score", "expected"),
    [
        ("dro", {"logprobs": -1e25, "advantages": 0.0}, -1.0, (0.025 * 1e50, 0.05 * 1e25)),
        ("dro", {"logprobs": -1.0, "advantages": 2.0}, -1e25, (2e25 + 0.025 * 1e50, -2 - 0.05 * 1e25)),
        ("value", {"old_values": 0.0, "returns": -1e25}, 1e25, (2e50, 2e25)),
    ],
)
def test_squares_may_be_too_large_for_float32(
    name: str, inputs: dict[str, float], score: float, expected: tuple[float, float]
) -> None:
    arrays = {key: torch.tensor([value]) for key, value in {**inputs, "weights": 1.0, "target_tokens": 0.0}.items()}
    scores = torch.tensor([score], requires_grad=True)
    loss, metrics = get_loss(name)(
        scores, None, LossInputs(arrays=arrays, datum_index=torch.zeros(1).long(), num_datums=1)
    )
    loss.backward()
    assert scores.grad is not None
    assert (loss.item(), scores.grad.item()) == pytest.approx(expected, rel=1e-6)
    assert all(value.isfinite() for value in metrics.values())


def test_a_metric_with_a_name_of_the_trainers_is_refused() -> None:
    p, inputs = random_case()

    def proud(logprobs: torch.Tensor, entropy: Any, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        del entropy, inputs
        return logprobs.sum(), {"mine": logprobs.sum(), "loss": logprobs.sum()}

    with pytest.raises(ValueError, match="'proud' returned a metric 'loss', which the trainer reports; rename it"):
        get_loss(proud)(torch.tensor(p), None, inputs)


LARGEST = float(np.finfo(np.float32).max)
DIFFERENCES = (-1000.0, -200.0, -88.0, -1.0, 0.0, 0.5, 60.0, 88.7, 89.0, 1000.0)


def _exp(x: float) -> tuple[float, float]:
    """Value and slope of the ratio, which is exact wherever float32 can hold it."""
    return (math.exp(x), math.exp(x)) if x <= math.log(LARGEST) else (LARGEST, 0.0)


def _token(name: str, p: float, q: float, a: float, dual: float) -> tuple[float, float]:
    """Loss of one token, which is a sequence of its own, and its slope."""
    r, slope = _exp(p - q)
    low, high = (0.9997, 1.0004) if name == "gspo" else (0.8, 1.2)
    if name == "cross_entropy":
        return -p, -1.0
    if name == "cispo":
        return -min(r, 4.0) * p * a, -min(r, 4.0) * a
    if name == "dro":
        return -(p * a - 0.025 * (p - q) ** 2), -(a - 0.05 * (p - q))
    if name == "importance_sampling" or low < r < high:
        return -r * a, -slope * a
    if a * (r - 1) > 0 or 0 < dual < r:
        return -a * (high if a > 0 else low if r < 1 else dual), 0.0
    return -r * a, -slope * a


def _divergence(estimator: str, p: float, f: float) -> tuple[float, float]:
    e, slope = _exp(f - p)
    k3 = (e - 1 - min(f - p, math.log(LARGEST)), 1 - e if slope or f < p else 0.0)
    return {"k1": (p - f, 1.0), "k2": ((p - f) ** 2 / 2, p - f), "k3": k3}[estimator]


def _extreme(name: str, config: dict[str, Any], p: float, q: float, a: float, o: float, f: float) -> Array:
    factor, cap = 1.0, config.get("importance_cap", 0.0)
    if cap:
        factor, q = _exp(o - q)[0], o
        factor = factor if factor <= cap else cap if config["importance_mode"] == "truncate" else 0.0
    found = factor * np.array(_token(name, p, q, a, config.get("dual_clip_threshold", 0.0)))
    if kl_coef := config.get("kl_coef", 0.0):
        found += kl_coef * np.array(_divergence(config["kl_estimator"], p, f))
    return found


@pytest.mark.stranger("B1")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dual_clip_threshold": 3.0},
        {"importance_cap": 2.0, "importance_mode": "truncate"},
        {"importance_cap": 2.0, "importance_mode": "mask"},
        *({"kl_coef": 0.5, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")),
    ],
)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "value"])
def test_no_difference_of_log_probs_makes_a_nan(name: str, config: dict[str, Any]) -> None:
    if not config.keys() <= {*get_loss(name).takes, *option_defaults(LOSSES[name].function)}:
        return
    cases = np.array([*itertools.product(DIFFERENCES, DIFFERENCES, (-2.0, 0.0, 1.0))])
    p = np.minimum(cases[:, 0], 0) - 0.5
    o = p - cases[:, 0]
    q = o - cases[:, 1] if "importance_cap" in config else o
    columns = {"logprobs": q, "advantages": cases[:, 2], "old_logprobs": o, "reference_logprobs": p + cases[:, 1]}
    arrays = {key: torch.tensor(values, dtype=torch.float32) for key, values in columns.items()}
    arrays |= {"weights": torch.ones(len(p)), "target_tokens": torch.zeros(len(p), dtype=torch.long)}
    inputs = LossInputs(arrays=arrays, datum_index=torch.arange(len(p)), num_datums=len(p))
    logprobs, loss = torch.tensor(p, dtype=torch.float32, requires_grad=True), get_loss(name, config)
    rounded = [values.double().tolist() for values in (logprobs, *list(arrays.values())[:4])]
    expected = np.array([_extreme(name, config, *row) for row in zip(*rounded, strict=True)])
    total, metrics = loss(logprobs, None, inputs)
    total.backward()
    assert logprobs.grad is not None
    with np.errstate(over="ignore"):  # a gradient of twice the largest ratio is infinite by definition
        np.testing.assert_allclose(logprobs.grad, expected[:, 1].astype(np.float32), rtol=1e-6, atol=1e-36)
    assert total.item() == pytest.approx(expected[:, 0].sum(), rel=1e-6)
    assert all(math.isfinite(value) for value in metrics.values())
    for d in range(len(p)):
        rows, alone = one_datum(inputs, d)
        assert loss(logprobs[rows], None, alone)[0].item() == pytest.approx(expected[d, 0], rel=1e-6)


@pytest.mark.stranger("B1")
def test_a_ratio_that_overflows_spoils_no_other_token() -> None:
    def step(*advantages: float) -> tuple[float, list[float]]:
        arrays = {"logprobs": [-100.0, -1.0], "advantages": advantages, "weights": [1.0, 1.0]}
        tensors = {name: torch.tensor(values) for name, values in arrays.items()}
        inputs = LossInputs(arrays=tensors, datum_index=torch.zeros(2, dtype=torch.long), num_datums=1)
        logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
        loss = get_loss("ppo")(logprobs, None, inputs)[0]
        loss.backward()
        assert logprobs.grad is not None
        return loss.item(), logprobs.grad.tolist()

    assert step(1.0, 1.0) == (pytest.approx(-2.2), [0, -1])
    assert step(0.0, 1.0) == (-1, [0, -1])


@pytest.mark.stranger("B2")
@pytest.mark.parametrize("config", [{}, {"kl_coef": 0.5, "entropy_coef": 0.1, "importance_cap": 1.5}])
@pytest.mark.parametrize("name", [*LOSSES, "_half_square"])
def test_a_position_that_is_only_reported_changes_nothing(name: str, config: dict[str, Any]) -> None:
    loss = get_loss(_half_square if name == "_half_square" else name)
    loss = get_loss(loss, {option: value for option, value in config.items() if option in loss.takes})
    p, inputs = random_case(lengths=(4, 3, 6))
    reported = np.array([0, 1, 4, 8, 9, 12])
    kept = np.setdiff1d(np.arange(len(p)), reported)
    without = {key: array[kept] for key, array in inputs.arrays.items()}
    fewer = LossInputs(arrays=without, datum_index=inputs.datum_index[kept], num_datums=3)
    arrays = {key: array.clone() for key, array in inputs.arrays.items()}
    for key, absurd in {"weights": 0.0, "logprobs": 0.0, "advantages": 9.0, "returns": 99.0}.items():
        arrays[key][reported] = absurd
    p[reported] = -700
    logprobs, entropy = torch.tensor(p, requires_grad=True), torch.linspace(0, 1, len(p), dtype=torch.float64)
    total, metrics = loss(logprobs, entropy, replace(inputs, arrays=arrays))
    expected, expected_metrics = loss(logprobs[kept], entropy[kept], fewer)
    assert total == expected
    assert metrics == expected_metrics
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert not gradient[reported].any()
    assert torch.equal(gradient, torch.autograd.grad(expected, logprobs)[0])


@pytest.mark.stranger("B2")
def test_gspo_takes_no_mean_over_reported_positions() -> None:
    weights, q = [0.0] * 6 + [1.0] * 4, [0.0] * 6 + [-1.1] * 4
    arrays = {"weights": weights, "logprobs": q, "advantages": [1.0] * 10}
    tensors = {name: torch.tensor(values) for name, values in arrays.items()}
    inputs = LossInputs(arrays=tensors, datum_index=torch.zeros(10, dtype=torch.long), num_datums=1)
    loss = get_loss("gspo", {"clip_low_threshold": 0.01, "clip_high_threshold": 100.0})
    assert loss(torch.tensor([0.0] * 6 + [-1.0] * 4), None, inputs)[0].item() == pytest.approx(-4.4207, abs=1e-4)
