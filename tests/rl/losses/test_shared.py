"""Options that all policy losses share, against formulas in NumPy; their gradients; values that are refused."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.packing import pack_row, shareable_prefix
from rl.losses import LOSSES, Loss, get_loss
from rl.losses.shared import KLEstimator, kl_terms
from rl.types import Datum
from tests.rl.losses.cases import Array, one_datum, random_case, slopes, without
from trainer.engines.pytorch.row_runner import loss_inputs

POLICY_LOSSES = [name for name, loss in LOSSES.items() if "kl_coef" in loss.takes]
CORRECTED_LOSSES = [name for name, loss in LOSSES.items() if "importance_cap" in loss.takes]


def _kl(p: Array, f: Array, estimator: str) -> Array:
    log_ratio = f - p
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - log_ratio - 1}[estimator]


def test_every_loss_of_log_probs_and_advantages_takes_them() -> None:
    assert set(POLICY_LOSSES) == {name for name, loss in LOSSES.items() if "advantages" in loss.required_inputs}
    assert set(CORRECTED_LOSSES) == set(POLICY_LOSSES) - {"dro"}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_kl_to_the_reference_is_added(name: str, estimator: str) -> None:
    p, inputs = random_case()
    w, f = inputs.weights.numpy(), inputs["reference_logprobs"].numpy()
    logprobs = torch.tensor(p, requires_grad=True)
    bare = get_loss(name)(logprobs, None, inputs)[0]
    loss, metrics = get_loss(name, {"kl_coef": 0.3, "kl_estimator": estimator})(logprobs, None, inputs)
    assert (loss - bare).item() == pytest.approx(0.3 * np.sum(w * _kl(p, f, estimator)))
    assert metrics["kl_reference"].item() == pytest.approx(np.sum(_kl(p, f, estimator)))
    (gradient,) = torch.autograd.grad(loss - bare, logprobs)
    expected = slopes(lambda moved: 0.3 * float(np.sum(w * _kl(moved, f, estimator))), p)
    assert gradient.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_estimators_have_the_expected_gradients_that_are_claimed() -> None:
    # Over a vocabulary of 7 the expectation over tokens is an exact sum.
    logits, reference = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    p, f = logits.log_softmax(0), reference.log_softmax(0)
    forward, reverse = (p.exp() * (p - f)).sum(), (f.exp() * (f - p)).sum()

    def gradient(of: torch.Tensor) -> Array:
        return torch.autograd.grad(of, logits, retain_graph=True)[0].numpy()

    def expected(estimator: KLEstimator) -> torch.Tensor:
        return (p.exp().detach() * kl_terms(p, f, estimator)).sum()

    assert expected("k1").item() == pytest.approx(forward.item())
    assert expected("k3").item() == pytest.approx(forward.item())
    assert gradient(expected("k1")) == pytest.approx(0, abs=1e-12)
    assert gradient(expected("k2")) == pytest.approx(gradient(forward))
    assert gradient(expected("k3")) == pytest.approx(gradient(reverse))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_entropy_bonus_raises_entropy(name: str) -> None:
    p, inputs = random_case()
    entropy = torch.rand(len(p), dtype=torch.float64, requires_grad=True)
    bare = get_loss(name)(torch.tensor(p), entropy, inputs)[0]
    loss, metrics = get_loss(name, {"entropy_coef": 0.1})(torch.tensor(p), entropy, inputs)
    assert (bare - loss).item() == pytest.approx(0.1 * (inputs.weights * entropy).sum().item())
    assert metrics["entropy"].item() == pytest.approx(entropy.sum().item())
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.numpy() == pytest.approx(-0.1 * inputs.weights.numpy())


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("name", CORRECTED_LOSSES)
def test_importance_correction_splits_the_ratio_in_two(name: str, mode: str) -> None:
    p, inputs = random_case(size=40)
    q, o = inputs["logprobs"].numpy(), inputs["old_logprobs"].numpy()
    multiplier = np.exp(o - q)
    capped = multiplier > 1.3
    multiplier[capped] = 1.3 if mode == "truncate" else 1e-30  # it counts in the mean of a sequence's ratio
    # The same loss without the option: old log-probs as those of the generator, and the multiplier as weight.
    arrays = dict(inputs.arrays, logprobs=torch.tensor(o), weights=inputs.weights * torch.tensor(multiplier))
    by_hand = type(inputs)(arrays=arrays, datum_index=inputs.datum_index, num_datums=1)
    gradients: list[Array] = []
    for config, given_inputs in (({}, by_hand), ({"importance_cap": 1.3, "importance_mode": mode}, inputs)):
        logprobs = torch.tensor(p, requires_grad=True)
        loss, metrics = get_loss(name, config)(logprobs, None, given_inputs)
        loss.backward()
        assert logprobs.grad is not None
        gradients.append(logprobs.grad.numpy())
    assert gradients[1] == pytest.approx(gradients[0])
    assert 0 < metrics["capped_tokens"] == capped.sum()
    assert metrics["ratio_max"].item() == pytest.approx(np.exp(p - q).max())


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_multiplier_is_of_a_token_or_of_a_sequence(level: str, mode: str) -> None:
    p, inputs = random_case(3, (4, 9, 2, 7))
    w, q, a, o = (inputs[name].numpy() for name in ("weights", "logprobs", "advantages", "old_logprobs"))
    multiplier = np.exp(o - q)
    for d in range(inputs.num_datums):
        rows = inputs.datum_index.numpy() == d
        if level != "token":
            multiplier[rows] = np.prod(multiplier[rows]) ** (1 / rows.sum() if level == "geometric" else 1)
    outside = (multiplier < 0.7) | (multiplier > 1.3)
    assert 0 < outside.sum() < len(p)
    multiplier = np.where(outside, 0.0, multiplier) if mode == "mask" else np.clip(multiplier, 0.7, 1.3)
    config = {"importance_cap": 1.3, "importance_floor": 0.7, "importance_level": level, "importance_mode": mode}
    loss, metrics = get_loss("importance_sampling", config)(torch.tensor(p), None, inputs)
    assert loss.item() == pytest.approx(-np.sum(w * multiplier * np.exp(p - o) * a))
    assert metrics["capped_tokens"] == outside.sum()


@pytest.mark.parametrize("name", ["ppo", "gspo", "dro"])
def test_observations_add_their_cross_entropy_and_nothing_else(name: str) -> None:
    """In two datums of several turns; the prompt, and what follows the last answer, are no observations."""
    weights = [np.array(each, np.float32) for each in ([0, 0, 1, 1, 0, 0, 1, 0], [1, 0, 2, 1])]
    p, _ = random_case(2, (8, 4))
    rows = np.split(p.astype(np.float32), [8])
    batch = [
        Datum(
            tokens=np.arange(len(w)),
            loss_inputs={"target_tokens": np.arange(len(w)), "weights": w, "logprobs": row - 0.1, "advantages": row},
        )
        for w, row in zip(weights, rows, strict=True)
    ]
    bare, loss = get_loss(name), get_loss(name, {"observation_coef": 0.3})
    prepared = list(loss.prepared(batch))
    assert [datum.num_loss_tokens for datum in prepared] == [3, 3]
    assert shareable_prefix(prepared[0]).tolist() == [0, 1, 2]

    def of(data: Sequence[Datum], which: Loss) -> tuple[torch.Tensor, Array, dict[str, torch.Tensor]]:
        row = pack_row(data, share_prefixes=False)
        index = row.datum_index * 8 + row.datum_position
        logprobs = torch.tensor(p[index], requires_grad=True)
        value, metrics = which(logprobs, None, loss_inputs(row, torch.device("cpu")))
        (gradient,) = torch.autograd.grad(value, logprobs)
        spread = np.zeros(12)
        spread[index] = gradient.numpy()
        return value, spread, metrics

    (value, gradient, metrics), (without_them, its_gradient, _) = of(prepared, loss), of(batch, bare)
    observed = [4, 5, 9]
    assert (value - without_them).item() == pytest.approx(-0.3 * p[observed].sum())
    assert metrics["observation_loss"].item() == pytest.approx(-p[observed].sum())
    assert gradient - its_gradient == pytest.approx(np.where(np.isin(np.arange(12), observed), -0.3, 0.0))


def test_sequences_far_off_policy_lose_their_negative_terms() -> None:
    p, inputs = random_case(3, (4, 9, 2, 7))
    w, q, a = (inputs[name].numpy() for name in ("weights", "logprobs", "advantages"))
    kept = np.ones(len(p))
    for d in range(inputs.num_datums):
        rows = inputs.datum_index.numpy() == d
        if (q - p)[rows].mean() > 0.1:
            kept[rows & (a < 0)] = 0
    assert 0 < kept.sum() < len(p)
    logprobs = torch.tensor(p, requires_grad=True)
    loss, metrics = get_loss("importance_sampling", {"off_policy_sequence_threshold": 0.1})(logprobs, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.numpy() == pytest.approx(-w * kept * np.exp(p - q) * a)
    assert metrics["off_policy_tokens"] == np.sum(kept == 0)


def test_ppo_with_truncated_correction_is_the_papers_formula() -> None:
    p, inputs = random_case(size=60)
    w, q, a, o = (inputs[name].numpy() for name in ("weights", "logprobs", "advantages", "old_logprobs"))

    def formula(moved: Array) -> float:
        r = np.exp(moved - o)
        return float(-np.sum(w * np.minimum(np.exp(o - q), 2.0) * np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)))

    logprobs = torch.tensor(p, requires_grad=True)
    loss = get_loss("ppo", {"importance_cap": 2.0})(logprobs, None, inputs)[0]
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(formula(p))
    assert logprobs.grad.numpy() == pytest.approx(slopes(formula, p), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_clipping_needs_old_log_probs_for_the_correction(name: str) -> None:
    p, inputs = random_case(size=60)
    inputs, loss = without(inputs, "old_logprobs"), get_loss(name, {"importance_cap": 1.5})
    assert loss.required_inputs == ("logprobs", "advantages", "old_logprobs")
    message = rf"loss '{name}' needs the input 'old_logprobs' .* because importance_cap is above 0 and it clips"
    with pytest.raises(ValueError, match=message):
        loss(torch.from_numpy(p), None, inputs)
    get_loss(name, {"importance_cap": 0.0})(torch.from_numpy(p), None, inputs)


def test_without_old_log_probs_it_is_the_truncated_gradient() -> None:
    p, inputs = random_case(size=60)
    w, q, a = (inputs[key].numpy() for key in ("weights", "logprobs", "advantages"))
    logprobs = torch.tensor(p, requires_grad=True)
    loss = get_loss("importance_sampling", {"importance_cap": 1.5})
    loss(logprobs, None, without(inputs, "old_logprobs"))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.numpy() == pytest.approx(-w * np.minimum(np.exp(p - q), 1.5) * a)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2**16), st.booleans())
@settings(max_examples=20, deadline=None)
def test_all_options_together_are_a_sum_over_datums(lengths: list[int], seed: int, mask: bool) -> None:
    p, inputs = random_case(seed, lengths)
    entropy = torch.rand(len(p), dtype=torch.float64)
    config: dict[str, Any] = {"kl_coef": 0.2, "entropy_coef": 0.1, "importance_cap": 1.2}
    config["importance_mode"] = "mask" if mask else "truncate"
    for name in CORRECTED_LOSSES:
        loss = get_loss(name, config)
        whole, metrics = loss(torch.from_numpy(p), entropy, inputs)
        parts = [
            loss(torch.from_numpy(p)[rows], entropy[rows], part)
            for rows, part in (one_datum(inputs, d) for d in range(len(lengths)))
        ]
        assert whole.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-9, abs=1e-9)
        for key, value in metrics.items():
            merge = max if key.endswith("_max") else sum
            assert value.item() == pytest.approx(merge(part[1][key].item() for part in parts), rel=1e-9, abs=1e-9)


def test_metrics_tell_how_far_the_policy_moved() -> None:
    p, inputs = random_case()
    q = inputs["logprobs"].numpy()
    metrics = get_loss("ppo")(torch.tensor(p, requires_grad=True), None, inputs)[1]
    assert metrics["kl_generator"].item() == pytest.approx(np.sum(np.exp(p - q) - 1 - (p - q)))
    assert metrics["ratio_max"].item() == pytest.approx(np.exp(p - q).max())
    assert not any(value.requires_grad for value in metrics.values())
    at_home = get_loss("ppo")(torch.tensor(q), None, without(inputs, "reference_logprobs"))[1]
    assert at_home["kl_generator"] == 0
    assert "kl_reference" not in at_home
    weights = inputs.weights.clone()
    weights[::2] = 0  # as a prompt's, whose generator's log-probs are 0
    reported = replace(inputs, arrays={**inputs.arrays, "weights": weights})
    apart = get_loss("ppo")(torch.tensor(p), None, reported)[1]
    p, q = p[1::2], q[1::2]
    assert apart["kl_generator"].item() == pytest.approx(np.sum(np.exp(p - q) - 1 - (p - q)))
    assert apart["ratio_max"].item() == pytest.approx(np.exp(p - q).max())


def test_a_rank_without_scored_positions_changes_no_metric() -> None:
    inputs = one_datum(random_case()[1], datum=99)[1]
    loss, metrics = get_loss("ppo", {"kl_coef": 1.0, "importance_cap": 2.0})(torch.zeros(0), None, inputs)
    assert loss == 0
    assert not any(metrics.values())


def test_required_inputs_and_entropy_follow_from_the_options() -> None:
    assert get_loss("ppo").required_inputs == ("logprobs", "advantages")
    assert not get_loss("ppo").needs_entropy
    with_all = get_loss("ppo", {"kl_coef": 0.1, "entropy_coef": 0.1})
    assert with_all.required_inputs == ("logprobs", "advantages", "reference_logprobs")
    assert with_all.needs_entropy
    again = get_loss(with_all, {"clip_high_threshold": 1.3})
    assert again.required_inputs == with_all.required_inputs
    assert again.shared == with_all.shared
    assert get_loss(again).options == {"clip_high_threshold": 1.3}


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("ppo", {"kl_coeff": 0.1}, "did you mean 'kl_coef'"),
        ("ppo", {"kl_coef": -0.1}, "kl_coef'\\] is -0.1"),
        ("ppo", {"kl_coef": "0.1"}, "kl_coef'\\] is '0.1'"),
        ("ppo", {"kl_coef": None}, "kl_coef'\\] is None"),
        ("ppo", {"kl_estimator": "k4"}, "kl_estimator.*'k4'.*'k1', 'k2' or 'k3'"),
        ("ppo", {"kl_estimator": 3}, "kl_estimator'\\] is 3"),
        ("gspo", {"entropy_coef": float("inf")}, "entropy_coef.*inf.*finite"),
        ("ppo", {"importance_cap": 2.0, "importance_mode": "truncated"}, "'truncated'.*'truncate' or 'mask'"),
        ("ppo", {"importance_mode": "mask"}, "importance_cap.*is 0.*'mask' needs it above 0"),
        (
            "ppo",
            {"importance_level": "geometric"},
            "importance_cap.*is 0.*importance_level 'geometric' needs it above 0",
        ),
        ("ppo", {"importance_floor": 0.5}, "importance_cap.*is 0.*importance_floor 0.5 needs it above 0"),
        ("ppo", {"importance_cap": 2.0, "importance_floor": 3.0}, "importance_floor.*3.0.*importance_cap 2.0"),
        (
            "ppo",
            {"importance_cap": 2.0, "importance_level": "group"},
            "importance_level.*'group'.*'token', 'sequence' or 'geometric'",
        ),
        ("dro", {"importance_cap": 2.0}, "'importance_cap', which 'dro' does not know"),
        ("cross_entropy", {"kl_coef": 0.1}, "'kl_coef', which 'cross_entropy' does not know"),
    ],
)
def test_mistakes_are_named(loss: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_loss(loss, config)
