"""What every engine must do, each against transformers and the loop that anyone would write in plain PyTorch."""

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl.data.packing import PackedRow
from rl.lora import LoRAConfig
from rl.losses import LossInputs, get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import AdamParams, Datum
from tests.trainer.adapters import load_engine_or_adapter
from tests.trainer.reference import ReferencePolicy, importance_sampling, random_groups
from trainer.config import TrainerConfig
from trainer.engines import ENGINES, base, load_engine
from trainer.engines.base import Engine, Microbatch, MicrobatchHooks
from trainer.engines.plain_ranks import relative_error
from trainer.engines.pytorch.logprobs import logprobs_and_entropy

# AdamW makes a whole step of the smallest gradient; with this eps, not of one that is only a rounding error.
PARAMS = AdamParams(learning_rate=1e-3, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.5)
BATCH = [*random_batch((1, 17, 5, 40)), *random_groups([(7, (1, 4, 9, 4)), (20, (3, 3))], seed=1)]
MICROBATCHES = [BATCH[:3], [], BATCH[3:]]
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": tiny_llama,
    "qwen3_untied": lambda p: tiny_qwen3(p, tied=False),
}

UNTIED: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, tied=False),
    "qwen3": lambda path: tiny_qwen3(path, tied=False),
}

Build = Callable[[], Engine]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MODELS[request.param](tmp_path / "model")


@pytest.fixture(params=list(ENGINES))
def build(request: pytest.FixtureRequest, model: Path) -> Build:
    """Makes engines of one kind, all of them with the same weights."""
    return lambda: load_engine(TrainerConfig(model=model, engine=request.param, compute_dtype="float32"))


@pytest.fixture(params=[*ENGINES, "torchtitan adapter", "fsdp2 adapter"])
def build_any(request: pytest.FixtureRequest, tmp_path: Path) -> Build:
    """As `build`, of one model, and engines of adapters too."""
    engine, _, adapter = request.param.partition(" ")
    model, lora = tiny_llama(tmp_path / "tied"), LoRAConfig(rank=4) if adapter else None
    config = TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=lora)
    return lambda: load_engine_or_adapter(config)


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def parameters(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.hf_parameters()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    assert max(errors.values()) <= tolerance, errors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def step(engine: Engine, microbatches: Sequence[Sequence[Datum]] = MICROBATCHES) -> None:
    engine.forward_backward(microbatches, get_loss("cross_entropy"))
    engine.optim_step(PARAMS, 0.01)


def test_three_steps_equal_a_plain_loop(build: Build, model: Path) -> None:
    engine, reference = build(), ReferencePolicy(model)
    weights = list(reference.model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    for version in (1, 2, 3):
        output = engine.forward_backward(MICROBATCHES, get_loss("importance_sampling"))
        loss = reference.backward(BATCH, importance_sampling)
        assert output.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert output.metrics["num_loss_tokens"] == sum(datum.num_loss_tokens for datum in BATCH)
        assert_close(gradients(engine), reference.gradients(), 1e-5)

        result = engine.optim_step(PARAMS, 0.1)
        for weight in weights:
            assert weight.grad is not None
            weight.grad.mul_(0.1)
        norm = float(torch.nn.utils.clip_grad_norm_(weights, 0.5))
        assert norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert (result.policy_version, result.learning_rate, result.skipped) == (version, 1e-3, False)
        assert_close(parameters(engine), reference.parameters(), 1e-5)


def test_forward_equals_transformers_and_leaves_no_gradient(build: Build, model: Path) -> None:
    engine, reference = build(), ReferencePolicy(model)
    output = engine.forward(MICROBATCHES, entropy=True)
    assert output.entropy is not None
    for datum, logprobs, entropy in zip(BATCH, output.logprobs, output.entropy, strict=True):
        scored = datum.weights != 0
        np.testing.assert_allclose(logprobs, np.where(scored, reference.logprobs(datum).detach(), 0), atol=1e-5)
        np.testing.assert_allclose(entropy, np.where(scored, reference.entropy(datum).detach(), 0), atol=1e-5)
    assert not gradients(engine)
    with pytest.raises(ValueError, match="without a gradient"):
        engine.optim_step(PARAMS)


@pytest.mark.parametrize("make", ["smollm2", "llama", "qwen3"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_logits_equal_transformers(
    engine: str, make: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue("smollm2") if make == "smollm2" else UNTIED[make](tmp_path / "model")
    rows: list[Tensor] = []

    def record(hidden: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        rows.append(hidden @ weight.T)
        return logprobs_and_entropy(hidden, weight, *args, **kwargs)

    loaded = load_engine(TrainerConfig(model=path, engine=engine, compute_dtype="float32"))
    for module in list(sys.modules.values()):  # wherever the engine calls it from
        if module.__dict__.get("logprobs_and_entropy") is logprobs_and_entropy and module.__name__ != __name__:
            monkeypatch.setattr(module, "logprobs_and_entropy", record)
    reference = ReferencePolicy(path)
    batch = random_batch((60, 7, 33), vocab_size=reference.model.config.vocab_size)
    batch = [Datum(tokens=d.tokens, loss_inputs={"target_tokens": d.loss_inputs["target_tokens"]}) for d in batch]
    loaded.forward([batch])
    with torch.no_grad():
        difference = (rows[-1] - torch.cat([reference.logits(datum) for datum in batch])).abs().max()
    print(f"{engine} {make}: {difference:.1e}")
    assert difference <= 1e-3


def test_calls_accumulate_until_a_step_or_until_dropped(build_any: Build) -> None:
    once, twice = build_any(), build_any()
    once.forward_backward([BATCH], get_loss("ppo"))
    twice.forward_backward([BATCH[2:]], get_loss("ppo"))
    twice.forward([BATCH])
    twice.forward_backward([BATCH[:2]], get_loss("ppo"))
    assert_close(gradients(twice), gradients(once), 1e-5)
    twice.zero_grad()
    assert not gradients(twice)
    twice.forward_backward([BATCH], get_loss("ppo"))
    assert_close(gradients(twice), gradients(once), 1e-5)
    twice.optim_step(PARAMS)
    assert not gradients(twice)


def test_calls_of_one_row_each_add_up_to_the_bits_of_one_call(build_any: Build) -> None:
    rows = [BATCH[:3], BATCH[3:6], BATCH[6:]]
    once, apart = build_any(), build_any()
    once.forward_backward(rows, get_loss("ppo"))
    for row in rows:
        apart.forward_backward([row], get_loss("ppo"))
    assert_equal(gradients(apart), gradients(once))


def test_loss_that_raises_leaves_the_gradient_as_it_was(build_any: Build) -> None:
    def fails_on_the_second(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
        if inputs.num_datums == 2:
            raise ArithmeticError("my own mistake")
        return -logprobs.sum(), {}

    engine = build_any()
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    before = gradients(engine)
    with pytest.raises(ArithmeticError, match="my own mistake"):
        engine.forward_backward([BATCH[:3], BATCH[:2]], get_loss(fails_on_the_second))
    assert_equal(gradients(engine), before)
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    assert_close(gradients(engine), {name: 2 * grad for name, grad in before.items()}, 1e-6)


def test_a_multiplier_that_matches_no_parameter_is_refused_and_changes_nothing(build: Build) -> None:
    engine = build()
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    before = parameters(engine), gradients(engine)
    message = r"multipliers\['model.layer.\*'\] matches no parameter; names are such as model.embed_tokens.weight, "
    with pytest.raises(ValueError, match=message):
        engine.optim_step(replace(PARAMS, learning_rate_multipliers={"*.q_proj.*": 1.0, "model.layer.*": 0.5}))
    assert_equal(parameters(engine), before[0])
    assert_equal(gradients(engine), before[1])
    multipliers = {"*.q_proj.*": 1.0, "model.layers.*": 0.5}
    assert not engine.optim_step(replace(PARAMS, learning_rate_multipliers=multipliers)).skipped


def test_hooks_change_what_is_computed_and_what_is_returned(build_any: Build) -> None:
    def reverse(microbatch: Microbatch) -> Microbatch:
        return [replace(datum, tokens=datum.tokens[::-1].copy()) for datum in microbatch]

    def halve(row: PackedRow, scores: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert len(row.scored) == len(scores)
        assert not scores.requires_grad
        return scores / 2, entropy

    hooked, plain = build_any(), build_any()
    hooked.hooks = MicrobatchHooks(before=reverse, after=halve)
    expected = plain.forward_backward([reverse(m) for m in MICROBATCHES], get_loss("cross_entropy"))
    output = hooked.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
    for actual, reference in zip(output.logprobs, expected.logprobs, strict=True):
        np.testing.assert_array_equal(actual, reference / 2)
    before = gradients(hooked)
    assert_equal(before, gradients(plain))
    output = hooked.forward(MICROBATCHES, entropy=True)
    np.testing.assert_allclose(output.logprobs[1], expected.logprobs[1] / 2, atol=1e-6)
    for hooks, message in (
        (
            MicrobatchHooks(before=lambda microbatch: microbatch[1:]),
            r"hooks.before returned datums of \[17, 5\] tokens",
        ),
        (MicrobatchHooks(after=lambda row, scores, entropy: (scores[1:], entropy)), "hooks.after returned scores"),
    ):
        hooked.hooks = hooks
        with pytest.raises(ValueError, match=message):
            hooked.forward_backward(MICROBATCHES, get_loss("cross_entropy"))
        assert_equal(gradients(hooked), before)


def test_gradient_that_is_not_finite_changes_nothing(build_any: Build) -> None:
    def explode(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
        return logprobs.sum() * float("nan"), {}

    engine, untouched = build_any(), build_any()
    for each in (engine, untouched):
        step(each)
    engine.forward_backward([BATCH], get_loss(explode))
    result = engine.optim_step(PARAMS)
    assert result.skipped
    assert result.policy_version == engine.policy_version == 1
    for each in (engine, untouched):
        step(each)
    assert_equal(parameters(engine), parameters(untouched))


def test_checkpoint_round_trip_is_bitwise(build_any: Build, tmp_path: Path) -> None:
    engine, fresh = build_any(), build_any()
    step(engine)
    engine.save_checkpoint(tmp_path / "checkpoint")
    step(fresh)
    step(fresh)
    fresh.forward_backward([BATCH], get_loss("cross_entropy"))  # dropped by the load
    assert fresh.load_checkpoint(tmp_path / "checkpoint") == fresh.policy_version == 1
    for each in (engine, fresh):
        step(each)
    assert_equal(parameters(fresh), parameters(engine))


def test_parameters_have_the_names_and_values_of_the_model_directory(build: Build, model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    engine = build()
    assert_equal(parameters(engine), stored)
    step(engine)
    assert all(p.dtype == torch.float32 and not torch.equal(p, stored[name]) for name, p in engine.hf_parameters())


def test_export_is_what_was_trained(build: Build, tmp_path: Path) -> None:
    engine = build()
    step(engine)
    engine.export_hf(tmp_path / "export", torch.float32)
    assert_equal(ReferencePolicy(tmp_path / "export").parameters(), parameters(engine))


def test_the_example_of_the_interface_runs_as_it_stands(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paragraphs = (base.__doc__ or "").split("\n\n")
    example = textwrap.dedent(next(text for text in paragraphs if text.startswith("    ")))
    assert len(example.splitlines()) <= 10
    monkeypatch.chdir(model.parent)
    exec(example, {})
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def test_world_of_another_size_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="asks for 1 ranks"):
        build()
