"""Losses of recent papers against their formulas in NumPy, far-away log-probs, and what the controller selects."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from controller.commands.recipes import find_recipe, load_recipe
from controller.runs import GroupLoopConfig
from ownloop_shelf.published_losses import LOSSES
from rl.losses import LossInputs, get_loss
from rl.types import Datum
from tests.controller.handles.test_trainer_handle import assert_invalid_batches_are_refused
from tests.rl.losses.cases import Array, one_datum, random_case, slopes


def _arrays(inputs: LossInputs) -> tuple[Array, Array, Array, list[NDArray[np.int64]]]:
    datums = [np.flatnonzero(inputs.datum_index.numpy() == d) for d in range(inputs.num_datums)]
    return inputs.weights.numpy(), inputs["logprobs"].numpy(), inputs["advantages"].numpy(), datums


def _dppo(p: Array, inputs: LossInputs, held: Array, divergence: Callable[[float, float], float], most: float) -> float:
    w, q, a, _ = _arrays(inputs)
    total = 0.0
    for i in range(len(p)):
        away = (a[i] > 0 and held[i] > q[i]) or (a[i] < 0 and held[i] < q[i])
        if not (away and divergence(math.exp(held[i]), math.exp(q[i])) > most):
            total -= w[i] * math.exp(p[i] - q[i]) * a[i]
    return total


def _tv(p: Array, inputs: LossInputs, held: Array) -> float:
    return _dppo(p, inputs, held, lambda new, old: abs(new - old), 0.15)


def _kl(p: Array, inputs: LossInputs, held: Array) -> float:
    def divergence(new: float, old: float) -> float:
        return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))

    return _dppo(p, inputs, held, divergence, 0.05)


def _sapo(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, _ = _arrays(inputs)
    t = np.where(a > 0, 1.0, 1.05)
    return float(-np.sum(w * a * 4 / t / (1 + np.exp(-t * (np.exp(p - q) - 1)))))


def _gmpo(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, datums = _arrays(inputs)
    total = 0.0
    for rows in datums:
        r = np.exp(p[rows] - q[rows])
        clipped = np.where(a[rows] > 0, np.minimum(r, 1.49), np.maximum(r, 0.67))
        total -= np.sum(w[rows] * a[rows]) * np.prod(clipped) ** (1 / len(rows))
    return float(total)


def _vespo(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, datums = _arrays(inputs)
    total = 0.0
    for rows in datums:
        ratio = np.exp(np.sum(held[rows] - q[rows]))
        for i in rows:
            k, c = (2, 3) if a[i] > 0 else (3, 2)
            total -= w[i] * ratio**k * np.exp(c * (1 - ratio)) * p[i] * a[i]
    return float(total)


def _luspo(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, datums = _arrays(inputs)
    total = 0.0
    for rows in datums:
        s = np.exp(np.mean(held[rows] - q[rows])) * np.exp(p[rows] - held[rows])
        total -= np.sum(w[rows] * np.minimum(s * a[rows], np.clip(s, 0.9997, 1.0004) * a[rows]))
    return float(total)


def _m2po(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, datums = _arrays(inputs)
    kept = np.ones(len(p))
    for rows in datums:
        away = [i for i in rows if (held[i] - q[i]) * a[i] > 0]
        while away and np.mean([(held[i] - q[i]) ** 2 for i in away]) > 0.04:
            largest = max(away, key=lambda i: (held[i] - q[i]) ** 2)
            kept[largest] = 0
            away.remove(largest)
    return float(-np.sum(w * kept * np.exp(p - q) * a))


def _kimi_k25(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, _ = _arrays(inputs)
    return float(-np.sum(w * (np.clip(np.exp(p - q), 0.5, 2.0) * a - 1e-3 * (p - q) ** 2)))


def _clip_cov(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, _ = _arrays(inputs)
    r = np.exp(p - q)
    terms = np.minimum(r * a, np.clip(r, 0.8, 1.2) * a)
    return float(-np.sum((w * terms)[inputs["selected"].numpy() == 0]))


def _kl_cov(p: Array, inputs: LossInputs, held: Array) -> float:
    w, q, a, _ = _arrays(inputs)
    return float(-np.sum(w * (np.exp(p - q) * a - inputs["selected"].numpy() * np.abs(p - q))))


def _reverse_kl(p: Array, inputs: LossInputs, held: Array) -> float:
    w, f = inputs.weights.numpy(), inputs["teacher_logprobs"].numpy()
    return float(np.sum(w * (np.exp(p) * np.log(np.exp(p) / np.exp(f)) - np.exp(p) + np.exp(f))))


def _forward_kl(p: Array, inputs: LossInputs, held: Array) -> float:
    w, f = inputs.weights.numpy(), inputs["teacher_logprobs"].numpy()
    return float(np.sum(w * (np.exp(f) * np.log(np.exp(f) / np.exp(p)) - np.exp(f) + np.exp(p))))


def _jensen_shannon(p: Array, inputs: LossInputs, held: Array) -> float:
    w, f = inputs.weights.numpy(), inputs["teacher_logprobs"].numpy()
    student, teacher = np.exp(p), np.exp(f)
    middle = (student + teacher) / 2
    return float(np.sum(w * (student * np.log(student / middle) + teacher * np.log(teacher / middle))) / 2)


REFERENCES: dict[str, Callable[[Array, LossInputs, Array], float]] = {
    "dppo_tv": _tv,
    "dppo_kl": _kl,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "luspo": _luspo,
    "m2po": _m2po,
    "kimi_k25": _kimi_k25,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "reverse_kl": _reverse_kl,
    "forward_kl": _forward_kl,
    "jensen_shannon": _jensen_shannon,
}


def _case(seed: int, lengths: tuple[int, ...] = (7, 1, 12)) -> tuple[Array, LossInputs]:
    p, inputs = random_case(seed, lengths)
    p = np.minimum(p, -0.01)
    rng = np.random.default_rng(seed)
    more = {"selected": rng.integers(0, 2, len(p)).astype(float), "teacher_logprobs": -rng.exponential(size=len(p))}
    return p, replace(inputs, arrays={**inputs.arrays, **{name: torch.from_numpy(x) for name, x in more.items()}})


def test_every_loss_has_a_reference_and_is_found_by_name() -> None:
    assert set(REFERENCES) == set(LOSSES)
    assert all(get_loss(name).name == name for name in LOSSES)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient(name: str, seed: int) -> None:
    p, inputs = _case(seed)
    logprobs = torch.tensor(p, requires_grad=True)
    loss, _ = get_loss(name)(logprobs, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(REFERENCES[name](p, inputs, p), rel=1e-12)
    expected = slopes(lambda moved: REFERENCES[name](moved, inputs, p), p)
    assert logprobs.grad.numpy() == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_a_sum_over_datums(name: str) -> None:
    p, inputs = _case(5, (3, 9, 1, 6))
    whole = get_loss(name)(torch.tensor(p), None, inputs)[0].item()
    parts = [one_datum(inputs, d) for d in range(4)]
    alone = [get_loss(name)(torch.tensor(p)[rows], None, part)[0].item() for rows, part in parts]
    assert whole == pytest.approx(sum(alone), rel=1e-9)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("power", [0.0, 3.0, 1e30])
@pytest.mark.parametrize("decay", [0.0, 3.0, 1e30])
@pytest.mark.parametrize("difference", [-3e38, -1.0, 0.0, 1.0, 1e4, 3e38])
def test_the_weight_of_vespo_is_bounded(difference: float, decay: float, power: float, advantage: float) -> None:
    options = {
        f"{sign}_{name}": x for sign in ("positive", "negative") for name, x in (("power", power), ("decay", decay))
    }
    arrays = {"logprobs": min(difference, 0.0) - difference, "advantages": advantage, "weights": 1.0}
    p = torch.tensor([min(difference, 0.0)], requires_grad=True)
    inputs = LossInputs(
        arrays={name: torch.tensor([x]) for name, x in arrays.items()}, datum_index=torch.zeros(1).long(), num_datums=1
    )
    loss, _ = get_loss("vespo", options)(p, None, inputs)
    loss.backward()
    with np.errstate(over="ignore"):
        ratio = min(np.exp(np.longdouble(difference)), np.longdouble(np.finfo(np.float32).max))
        exponent = np.longdouble(power) * np.longdouble(difference) + np.longdouble(decay) * (1 - ratio)
    weight = np.exp(min(exponent, np.log(np.longdouble(np.finfo(np.float32).max))))
    assert p.grad is not None
    assert p.grad.item() == pytest.approx(-advantage * float(weight), rel=1e-6)


@pytest.mark.parametrize(("advantage", "temperature"), [(1.0, 1e-3), (-1.0, 1e30)])
def test_temperatures_of_sapo_do_not_mix(advantage: float, temperature: float) -> None:
    arrays = {"logprobs": -1.0, "advantages": advantage, "weights": 1.0}
    inputs = LossInputs(
        arrays={name: torch.tensor([x]) for name, x in arrays.items()}, datum_index=torch.zeros(1).long(), num_datums=1
    )
    p = torch.tensor([-1.0], requires_grad=True)
    options = {"positive_temperature": 1e-3, "negative_temperature": 1e30}
    loss, _ = get_loss("sapo", options)(p, None, inputs)
    loss.backward()  # at r = 1 the gate is 2 / t, and its slope 1
    assert loss.item() == pytest.approx(-advantage * 2 / temperature)
    assert p.grad is not None
    assert p.grad.item() == pytest.approx(-advantage)


@pytest.mark.parametrize("name", ["positive_temperature", "negative_temperature"])
def test_a_temperature_of_0_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"loss_config\['{name}'\] is 0; it must be above 0"):
        get_loss("sapo", {name: 0})


@pytest.mark.parametrize("name", LOSSES)
def test_no_difference_of_log_probs_makes_a_nan(name: str) -> None:
    for difference in (-1000.0, -100.0, -1.0, 0.0, 1.0, 88.7, 100.0, 1000.0):
        for advantage in (-2.0, 0.0, 1.0):
            p = torch.full((3,), min(difference, 0.0), requires_grad=True)
            arrays = {"logprobs": p.detach() - difference, "advantages": torch.full((3,), advantage)}
            arrays |= {"weights": torch.ones(3), "selected": torch.tensor([1.0, 0.0, 1.0])}
            arrays["teacher_logprobs"] = arrays["logprobs"]
            inputs = LossInputs(arrays=arrays, datum_index=torch.zeros(3, dtype=torch.long), num_datums=1)
            loss, metrics = get_loss(name)(p, None, inputs)
            (gradient,) = torch.autograd.grad(loss, p)
            assert loss.isfinite(), (difference, advantage)
            assert all(value.isfinite() for value in metrics.values())
            assert not gradient.isnan().any(), (difference, advantage)


@pytest.mark.parametrize("name", LOSSES)
def test_a_position_that_is_only_reported_changes_nothing(name: str) -> None:
    p, inputs = _case(1)
    inputs.arrays["weights"][::3] = 0
    kept = np.setdiff1d(np.arange(len(p)), np.arange(0, len(p), 3))
    arrays = {key: array[kept] for key, array in inputs.arrays.items()}
    fewer = replace(inputs, arrays=arrays, datum_index=inputs.datum_index[kept])
    p[::3] = -700
    assert get_loss(name)(torch.tensor(p), None, inputs)[0] == get_loss(name)(torch.tensor(p)[kept], None, fewer)[0]


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_terms_of_all_words_are_the_divergence(name: str) -> None:
    """Of a distribution's words, as a gradient of its logits too; of some words they are at most that."""
    logits, other = torch.from_numpy(np.random.default_rng(3).normal(size=(2, 40)))
    logits.requires_grad_()
    p, f = logits.log_softmax(0), other.log_softmax(0)
    arrays = {"weights": torch.ones(40), "teacher_logprobs": f}
    whole = LossInputs(arrays=arrays, datum_index=torch.zeros(40, dtype=torch.long), num_datums=1)
    loss = get_loss(name)(p, None, whole)[0]
    middle = ((p.exp() + f.exp()) / 2).log()
    kl = torch.nn.functional.kl_div  # of (log q, log p): KL(p || q)
    expected = {
        "reverse_kl": kl(f, p, log_target=True, reduction="sum"),
        "forward_kl": kl(p, f, log_target=True, reduction="sum"),
        "jensen_shannon": kl(middle.repeat(2), torch.cat([p, f]), log_target=True, reduction="sum") / 2,
    }[name]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    some = LossInputs(
        arrays={key: array[:7] for key, array in arrays.items()}, datum_index=whole.datum_index[:7], num_datums=1
    )
    assert 0 < get_loss(name)(p[:7], None, some)[0] < loss


def _batch() -> list[Datum]:
    rng = np.random.default_rng(0)
    batch: list[Datum] = []
    for length in (30, 5, 65):
        arrays = {"logprobs": -rng.exponential(size=length), "advantages": rng.normal(size=length)}
        inputs = {name: array.astype(np.float32) for name, array in arrays.items()}
        weights = (rng.random(length) < 0.8).astype(np.float32)
        tokens = rng.integers(0, 9, length)
        batch.append(Datum(tokens=tokens, loss_inputs={**inputs, "weights": weights, "target_tokens": tokens}))
    return batch


def _flat(batch: list[Datum], name: str) -> Array:
    return np.concatenate([datum.loss_inputs[name][datum.counted] for datum in batch]).astype(float)


def test_kl_cov_selects_the_largest_covariances_of_the_batch() -> None:
    batch = _batch()
    prepared = list(get_loss("kl_cov", {"selected_fraction": 0.1}).prepared(batch))
    q, a = _flat(batch, "logprobs"), _flat(batch, "advantages")
    covariance = (q - q.mean()) * (a - a.mean())
    assert _flat(prepared, "selected").tolist() == (covariance >= np.sort(covariance)[-int(0.1 * len(q))]).tolist()
    assert all(not datum.loss_inputs["selected"][~datum.counted].any() for datum in prepared)
    assert _flat(list(get_loss("kl_cov").prepared(batch)), "selected").sum() == 1  # at least one


def test_clip_cov_draws_among_the_covariances_in_its_range() -> None:
    batch = _batch()
    loss = get_loss("clip_cov", {"selected_fraction": 0.05, "covariance_low": 0.2, "covariance_high": 3.0})
    first, again = (_flat(list(loss.prepared(batch)), "selected") for _ in range(2))
    q, a = _flat(batch, "logprobs"), _flat(batch, "advantages")
    covariance = ((q - q.mean()) * (a - a.mean()))[first == 1]
    assert len(covariance) == int(0.05 * len(q))
    assert covariance.min() >= 0.2
    assert covariance.max() <= 3.0
    assert first.tolist() == again.tolist()


@pytest.mark.stranger("2.C2")
def test_clip_cov_leaves_out_a_token_of_a_small_batch_too() -> None:
    batch = _batch()
    prepared = list(get_loss("clip_cov", {"covariance_low": 0.2, "covariance_high": 3.0}).prepared(batch))
    assert sum(datum.num_loss_tokens for datum in batch) < 5000
    assert _flat(prepared, "selected").sum() == 1


SHARES = {"gspo": 0.5, "gmpo": 0.5, "sapo": 0.5, "luspo": 0.1, "ppo": 0.1, "cispo": 0.1, "importance_sampling": 0.1}


@pytest.mark.stranger("2.C2")
@pytest.mark.parametrize("loss", SHARES)
def test_recipes_weigh_sequences_as_the_paper_does(loss: str) -> None:
    recipe = load_recipe(find_recipe("grpo_smollm2_cpu"))
    batch = [_sequence(1, 1.0), _sequence(9, 1.0), _sequence(4, 1.0)]
    found = {name: _shares(replace(recipe, loss=loss, normaliser=name), batch[:2]) for name in NORMALISERS}
    assert found["paper"][0] == pytest.approx(SHARES[loss])
    assert [found[name][0] for name in ("tokens", "sequences", "constant")] == pytest.approx([0.1, 0.5, 0.1])
    assert found["sequences"][1] == pytest.approx(1.0), "the mean of two sequences' means"
    assert found["tokens"][1] == pytest.approx(1.0), "the mean over ten tokens"
    assert found["constant"][1] == pytest.approx(10 / (2 * recipe.sampling.max_tokens))
    whole, apart = (_gradients(recipe, batch, length=length, loss=loss) for length in (None, 7.0))
    np.testing.assert_allclose(whole, apart, rtol=1e-6)


NORMALISERS = ("paper", "tokens", "sequences", "constant")


def _sequence(length: int, advantage: float) -> Datum:
    arrays = {"logprobs": np.full(length, -1.0, np.float32), "advantages": np.full(length, advantage, np.float32)}
    tokens = np.arange(length)
    weights = np.ones(length, dtype=np.float32)
    return Datum(tokens=tokens, loss_inputs={"target_tokens": tokens, "weights": weights, **arrays})


def _gradients(config: GroupLoopConfig, batch: list[Datum], *, length: float | None, loss: str) -> list[float]:
    """By how much each sequence's log-probs are raised by the step, summed over its tokens."""
    data, scale = replace(config, loss=loss).normalised(batch, length=length)
    sizes = [len(datum.tokens) for datum in data]
    arrays = {name: torch.cat([torch.tensor(d.loss_inputs[name]) for d in data]) for name in data[0].loss_inputs}
    index = torch.repeat_interleave(torch.arange(len(data)), torch.tensor(sizes))
    logprobs = torch.full((sum(sizes),), -1.0, requires_grad=True)
    get_loss(loss)(logprobs, None, LossInputs(arrays=arrays, datum_index=index, num_datums=len(data)))[0].backward()
    assert logprobs.grad is not None
    return [-scale * float(part.sum()) for part in logprobs.grad.split(sizes)]


def _shares(config: GroupLoopConfig, batch: list[Datum]) -> tuple[float, float]:
    """The first sequence's share of the gradient, and the whole gradient."""
    first, second = _gradients(config, batch, length=None, loss=config.loss)
    return first / (first + second), first + second


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_a_batch_without_a_scored_token_has_none_selected(name: str) -> None:
    (datum, *_) = _batch()
    silent = datum.weighted(0.0)
    assert list(get_loss(name).prepared([])) == []
    assert not get_loss(name).prepared([silent])[0].loss_inputs["selected"].any()


def test_a_loss_that_reads_the_whole_batch_gets_no_invalid_one(tmp_path: Path) -> None:
    assert_invalid_batches_are_refused("kl_cov", tmp_path)
