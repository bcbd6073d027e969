"""The torchtitan engine alone, against transformers and plain autograd."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.data.batching import plan_batch
from rl.losses import LossInputs, get_loss
from rl.tiny_models import VOCAB_SIZE, random_batch, tiny_dense, tiny_llama, tiny_qwen3
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import ReferencePolicy, cross_entropy, importance_sampling, random_groups

LENGTHS = (1, 17, 5, 40, 9, 23)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": lambda path: tiny_llama(path, tied=True),
    "llama_untied": lambda path: tiny_llama(path, tied=False),
    "llama_multi_head": lambda path: tiny_llama(path, num_kv_heads=4),
    "llama_rope_scaling": lambda path: tiny_llama(path, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-2),
    "qwen2_untied": lambda path: tiny_dense("qwen2", path, tied=False),
    "qwen3_tied": lambda path: tiny_qwen3(path, tied=True),
    "qwen3_untied": lambda path: tiny_qwen3(path, tied=False),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "model")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def build(model: Path, **options: object) -> Engine:
    return load_engine(TrainerConfig(model=model, **{"compute_dtype": "float32", **options}))  # pyright: ignore[reportArgumentType]


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.hf_parameters()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) <= tolerance, errors


def assert_logprobs(batch: Sequence[Datum], logprobs: Sequence[np.ndarray], reference: ReferencePolicy) -> None:
    for datum, found in zip(batch, logprobs, strict=True):
        expected = np.where(datum.scored, reference.logprobs(datum).detach().numpy(), 0)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_logprobs_and_entropy_equal_transformers(model: Path) -> None:
    batch = random_batch(LENGTHS)
    output = build(model).forward([batch], entropy=True)
    reference = ReferencePolicy(model)
    assert output.entropy is not None
    assert_logprobs(batch, output.logprobs, reference)
    for datum, entropy in zip(batch, output.entropy, strict=True):
        expected = np.where(datum.scored, reference.entropy(datum).detach().numpy(), 0)
        np.testing.assert_allclose(entropy, expected, atol=1e-5)


def test_every_gradient_equals_autograd(model: Path) -> None:
    batch = random_batch(LENGTHS)
    engine, reference = build(model), ReferencePolicy(model)
    output = engine.forward_backward([batch], get_loss("importance_sampling"))
    assert output.metrics["loss"] == pytest.approx(reference.backward(batch, importance_sampling), rel=1e-5)
    assert output.metrics["num_loss_tokens"] == sum(datum.num_loss_tokens for datum in batch)
    assert_close(gradients(engine), reference.gradients(), 1e-5)


# Prompts with several completions, one with a single token, one alone; and a group too large for one masked call.
GROUPS = [(7, (1, 4, 9, 4)), (20, (3, 3)), (5, (6,)), (60, (60,) * 10)]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("groups", "opening", "reported", "num_words"),
    [(GROUPS[:3], 0, False, VOCAB_SIZE), (GROUPS, 0, False, 2), (GROUPS, 8, False, 2), (GROUPS, 8, True, 2)],
)
def test_what_datums_share_changes_no_gradient(
    model: Path, groups: list[tuple[int, tuple[int, ...]]], opening: int, reported: bool, num_words: int
) -> None:
    batch = random_groups(groups, opening=opening, reported=reported, vocab_size=num_words)
    engine, reference = build(model), ReferencePolicy(model)
    assert engine.shares_prefixes
    output = engine.forward_backward([batch], get_loss("importance_sampling"))
    assert output.metrics["loss"] == pytest.approx(
        reference.backward(batch, importance_sampling), rel=1e-5, abs=1e-4
    )  # terms cancel
    assert output.metrics["num_loss_tokens"] == sum(datum.num_loss_tokens for datum in batch)
    assert_close(gradients(engine), reference.gradients(), 1e-5)
    assert_logprobs(batch, output.logprobs, reference)


def test_activation_checkpointing_changes_no_gradient(llama: Path) -> None:
    batch = random_batch(LENGTHS)
    expected = build(llama)
    expected.forward_backward([batch], get_loss("cross_entropy"))
    for policy in ("selective", "full"):
        engine = build(llama, activation_checkpointing=policy)
        engine.forward_backward([batch], get_loss("cross_entropy"))
        assert_close(gradients(engine), gradients(expected), 1e-6)


@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_gradient_does_not_depend_on_packing(llama: Path, budget: int) -> None:
    batch = random_batch(LENGTHS)
    engine, reference = build(llama), ReferencePolicy(llama)
    plan = plan_batch(batch, num_ranks=1, max_tokens_per_microbatch=budget, share_prefixes=True)
    output = engine.forward_backward(plan.split(batch)[0], get_loss("cross_entropy"))
    reference.backward(batch, cross_entropy)
    assert_close(gradients(engine), reference.gradients(), 1e-5)
    assert_logprobs(batch, plan.restore([output.logprobs]), reference)


def test_two_calls_accumulate_to_one_on_the_union(llama: Path) -> None:
    batch, params = random_batch(LENGTHS), AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)
    once, twice = build(llama), build(llama)
    once.forward_backward([batch], get_loss("ppo"))
    twice.forward_backward([batch[:2]], get_loss("ppo"))
    twice.forward_backward([batch[2:4], batch[4:]], get_loss("ppo"))
    assert_close(gradients(twice), gradients(once), 1e-6)
    first, second = once.optim_step(params, 0.1), twice.optim_step(params, 0.1)
    assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-6)


STEPS = (
    (AdamParams(learning_rate=1e-2, grad_clip_norm=0.0), 0.1),
    (AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5), 0.2),
    (
        AdamParams(
            learning_rate=1e-2,
            weight_decay=0.5,
            grad_clip_norm=100.0,
            learning_rate_multipliers={"model.embed_tokens.*": 0.0, "*.self_attn.*": 0.3, "*.q_proj.*": 9.0},
        ),
        -0.5,
    ),
)


def test_steps_equal_adamw_with_the_values_of_each_call(llama: Path) -> None:
    batch = random_batch(LENGTHS)
    engine, reference = build(llama), ReferencePolicy(llama)
    optimizer = torch.optim.AdamW(reference.model.parameters(), lr=0.0)
    for version, (params, grad_scale) in enumerate(STEPS, start=1):
        engine.forward_backward([batch], get_loss("cross_entropy"))
        step = engine.optim_step(params, grad_scale)
        reference.backward(batch, cross_entropy)
        for gradient in reference.gradients().values():
            gradient.mul_(grad_scale)
        clip = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip)
        optimizer.param_groups = [
            {
                **optimizer.defaults,
                "params": [parameter],
                "lr": params.learning_rate * (_expected_multiplier(name) if params.learning_rate_multipliers else 1.0),
                "betas": (params.beta1, params.beta2),
                "eps": params.eps,
                "weight_decay": params.weight_decay,
            }
            for name, parameter in reference.model.named_parameters()
        ]
        optimizer.step()
        optimizer.zero_grad()

        assert step.policy_version == engine.policy_version == version
        assert step.learning_rate == params.learning_rate
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert_close(parameters(engine), reference.parameters(), 1e-5)


def _expected_multiplier(name: str) -> float:
    if "embed_tokens" in name:
        return 0.0
    return 0.3 if "self_attn" in name else 1.0


def test_bfloat16_compute_keeps_float32_parameters_and_gradients(llama: Path) -> None:
    batch = random_batch(LENGTHS)
    engine, reference = build(llama, compute_dtype="bfloat16"), ReferencePolicy(llama)
    engine.forward_backward([batch[:3]], get_loss("cross_entropy"))
    engine.forward_backward([batch[3:]], get_loss("cross_entropy"))
    reference.backward(batch, cross_entropy)
    assert all(p.dtype == torch.float32 for _, p in engine.hf_parameters())
    assert all(g.dtype == torch.float32 for g in gradients(engine).values())
    assert_close(gradients(engine), reference.gradients(), 6e-2)

    # Steps too small for bfloat16 must add up in the parameters and, in time, be computed with.
    before, logprobs = parameters(engine), engine.forward([batch]).logprobs
    for _ in range(20):
        engine.forward_backward([batch], get_loss("cross_entropy"))
        engine.optim_step(AdamParams(learning_rate=2e-4))
    moved = (parameters(engine)["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max()
    assert 2e-3 < moved < 5e-3
    after = engine.forward([batch]).logprobs
    assert sum((a * d.weights).sum() for a, d in zip(after, batch, strict=True)) > sum(
        (b * d.weights).sum() for b, d in zip(logprobs, batch, strict=True)
    )


def test_gradient_that_is_not_finite_skips_the_step(llama: Path) -> None:
    def explode(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
        return logprobs.sum() * float("inf"), {}

    batch, engine = random_batch(LENGTHS), build(llama)
    engine.forward_backward([batch], get_loss("cross_entropy"))
    engine.optim_step(AdamParams(learning_rate=1e-3))
    before = parameters(engine)
    engine.forward_backward([batch], get_loss(explode))
    step = engine.optim_step(AdamParams(learning_rate=1e-3))
    assert step.skipped
    assert not np.isfinite(step.grad_norm)
    assert step.policy_version == 1
    assert all(torch.equal(before[name], p) for name, p in parameters(engine).items())
    engine.forward_backward([batch], get_loss("cross_entropy"))
    assert not engine.optim_step(AdamParams(learning_rate=1e-3)).skipped
    assert all(torch.isfinite(p).all() for p in parameters(engine).values())


def test_loss_that_raises_leaves_the_gradient_as_it_was(llama: Path) -> None:
    def refuse(logprobs: torch.Tensor) -> None:
        computed.append(weakref.ref(logprobs))
        raise KeyError("unknown")

    def fails_on_the_second(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
        if inputs.num_datums == 2:
            try:
                refuse(logprobs)
            except KeyError as error:
                raise ArithmeticError("my own mistake") from error
        return -logprobs.sum(), {}

    batch, engine, computed = random_batch(LENGTHS), build(llama), list[weakref.ref[torch.Tensor]]()
    engine.forward_backward([batch], get_loss("cross_entropy"))
    before = gradients(engine)
    with pytest.raises(ArithmeticError, match="my own mistake") as caught:
        engine.forward_backward([batch[:3], batch[:2]], get_loss(fails_on_the_second))
    assert isinstance(caught.value.__cause__, KeyError)
    assert computed[0]() is None, "who keeps the error does not keep the memory"
    after = gradients(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.forward_backward([batch], get_loss("cross_entropy"))
    assert_close(gradients(engine), {name: 2 * grad for name, grad in before.items()}, 1e-6)


def test_custom_loss_has_entropy_with_gradient_and_metrics(llama: Path) -> None:
    def entropy_bonus(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
        assert entropy is not None
        return -entropy.sum(), {"entropy": entropy.sum(), "entropy_max": entropy.max()}

    batch, engine, reference = random_batch((9, 12, 4)), build(llama), ReferencePolicy(llama)
    output = engine.forward_backward([batch[:1], batch[1:]], get_loss(entropy_bonus))
    entropies = [reference.entropy(d)[torch.from_numpy(d.weights != 0)] for d in batch]
    (-torch.cat(entropies).sum()).backward()
    assert_close(gradients(engine), reference.gradients(), 1e-5)
    assert output.metrics["entropy"] == pytest.approx(torch.cat(entropies).sum().item(), rel=1e-5)
    assert output.metrics["entropy_max"] == pytest.approx(torch.cat(entropies).max().item(), rel=1e-5)


def test_datum_without_scored_positions_returns_zeros(llama: Path) -> None:
    batch = random_batch((6, 7))
    silent = Datum(tokens=batch[0].tokens, loss_inputs={**batch[0].loss_inputs, "weights": np.zeros(6, np.float32)})
    engine = build(llama)
    output = engine.forward_backward([[silent], [batch[1]]], get_loss("ppo"))
    assert [array.tolist() for array in output.logprobs[:1]] == [[0.0] * 6]
    assert output.metrics["num_loss_tokens"] == batch[1].num_loss_tokens


def test_forward_leaves_no_gradient(llama: Path) -> None:
    engine = build(llama)
    engine.forward([random_batch(LENGTHS)])
    assert not gradients(engine)
    with pytest.raises(ValueError, match="without a gradient"):
        engine.optim_step(AdamParams(learning_rate=1e-3))


def test_grad_scale_that_is_not_finite_is_refused(llama: Path) -> None:
    engine = build(llama)
    engine.forward_backward([random_batch(LENGTHS)], get_loss("cross_entropy"))
    with pytest.raises(ValueError, match="grad_scale is nan"):
        engine.optim_step(AdamParams(learning_rate=1e-3), float("nan"))
