"""A trainer with a value head is a critic: one value per position, against transformers and plain autograd."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from rl.losses import LossInputs, get_loss
from rl.system.hardware import without_walking_what_exists
from rl.tiny_models import critic_batch, tiny_critic, tiny_llama, tiny_qwen3
from rl.types import AdamParams, Datum, Head
from tests.trainer.engine_params import ENGINE_PARAMS, ENGINES, engine_param
from trainer.config import TrainerConfig
from trainer.engine_table import all_engines
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error
from trainer.engines.contract.reference import random_groups
from trainer.engines.model_check import check_model
from trainer.engines.pytorch import logprobs
from trainer.engines.pytorch.logprobs import LogitsMemory

LENGTHS = (1, 17, 5, 40)
BATCH = critic_batch(LENGTHS)
Build = Callable[..., Engine]


@pytest.fixture
def critic(tmp_path: Path) -> Path:
    return tiny_critic(tmp_path / "critic")


@pytest.fixture(params=ENGINE_PARAMS)
def build(request: pytest.FixtureRequest) -> Build:
    def of(model: Path, head: Head = "value") -> Engine:
        return load_engine(TrainerConfig(model=model, engine=request.param, head=head, compute_dtype="float32"))

    return of


class ReferenceCritic:
    """transformers' backbone times the weights of the head, one datum at a time."""

    def __init__(self, path: Path) -> None:
        self.model: LlamaForSequenceClassification = LlamaForSequenceClassification.from_pretrained(path)

    def values(self, datum: Datum) -> Tensor:
        """[T]"""
        hidden = self.model.model(torch.from_numpy(datum.tokens)[None]).last_hidden_state[0]
        return (hidden @ self.model.score.weight.T)[:, 0]

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def gradients(engine: Engine) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def assert_values(outputs: tuple[NDArray[np.float32], ...] | None, expected: Callable[[Datum], Tensor]) -> None:
    assert outputs is not None
    for datum, values in zip(BATCH, outputs, strict=True):
        np.testing.assert_allclose(values, np.where(datum.weights != 0, expected(datum).detach().numpy(), 0), atol=1e-5)


def test_values_and_every_gradient_equal_plain_autograd(build: Build, critic: Path) -> None:
    engine, reference = build(critic), ReferenceCritic(critic)
    assert_values(engine.forward([BATCH[:3], [], BATCH[3:]]).values, reference.values)

    output = engine.forward_backward([BATCH[:3], BATCH[3:]], get_loss("value", {"clip_range": 0.3}))
    total = 0.0
    for datum in BATCH:
        old, target, weights = (
            torch.from_numpy(a) for a in (datum.loss_inputs["old_values"], datum.loss_inputs["returns"], datum.weights)
        )
        values = reference.values(datum)
        clipped = torch.minimum(torch.maximum(values, old - 0.3), old + 0.3)
        loss = 0.5 * (weights * torch.maximum((values - target) ** 2, (clipped - target) ** 2)).sum()
        loss.backward()
        total += loss.item()
    assert output.metrics["loss"] == pytest.approx(total, rel=1e-5)
    assert output.logprobs == ()
    assert_values(output.values, reference.values)
    expected, actual = reference.gradients(), gradients(engine)
    assert actual.keys() == expected.keys()
    assert max(relative_error(actual[name], expected[name]) for name in expected) <= 1e-5


@pytest.mark.seconds
@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_begins_at_zero_and_learns_a_linear_target(build: Build, tmp_path: Path, tied: bool) -> None:
    engine = build(tiny_qwen3(tmp_path / "model", tied=tied))
    names = dict(engine.hf_parameters())
    assert names["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in names

    def with_targets(datum: Datum) -> Datum:
        targets = 2.0 + 0.05 * np.arange(len(datum.tokens), dtype=np.float32)
        zeros = np.zeros_like(targets)
        return Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, "returns": targets, "old_values": zeros})

    batch = [with_targets(datum) for datum in BATCH]
    values = engine.forward([batch]).values
    assert values is not None
    assert not any(array.any() for array in values)
    errors: list[float] = []
    for _ in range(60):
        output = engine.forward_backward([batch], get_loss("value", {"clip_range": 0}))
        errors.append(output.metrics["squared_error"] / output.metrics["num_loss_tokens"])
        engine.optim_step(AdamParams(learning_rate=1e-2), 1 / output.metrics["num_loss_tokens"])
    assert errors[0] > 4
    assert errors[-1] < 0.02


def test_prefixes_that_datums_share_change_no_gradient(critic: Path) -> None:
    def squares(values: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
        assert entropy is None
        return (inputs.weights * (values - 1) ** 2).sum(), {}

    groups = random_groups([(7, (1, 4, 9, 4)), (20, (3, 3))])
    shared, apart = (load_engine(TrainerConfig(model=critic, head="value", compute_dtype="float32")) for _ in range(2))
    shared.forward_backward([groups], get_loss(squares))
    apart.forward_backward([[datum] for datum in groups], get_loss(squares))
    expected, actual = gradients(apart), gradients(shared)
    assert max(relative_error(actual[name], expected[name]) for name in expected) <= 1e-5


def test_an_export_loads_as_a_classifier_and_as_a_critic(build: Build, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    engine = build(model)
    for _ in range(2):
        engine.forward_backward([BATCH], get_loss("value"))
        engine.optim_step(AdamParams(learning_rate=1e-2))
    engine.export_hf(tmp_path / "export", torch.float32)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert classifier.num_labels == 1
    expected = engine.forward([BATCH]).values
    assert expected is not None
    for datum, values in zip(BATCH, expected, strict=True):
        logits = classifier(torch.from_numpy(datum.tokens)[None]).logits  # of the last token
        np.testing.assert_allclose(values[-1], logits.item(), atol=1e-5)

    again = build(tmp_path / "export").forward([BATCH]).values
    assert again is not None
    assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))

    engine.save_checkpoint(tmp_path / "checkpoint")
    fresh = build(model)
    assert fresh.load_checkpoint(tmp_path / "checkpoint") == 2
    restored = fresh.forward([BATCH]).values
    assert restored is not None
    assert all(np.array_equal(a, b) for a, b in zip(restored, expected, strict=True))
    with pytest.raises(ValueError, match="head 'value' instead of 'lm'"):
        build(model, "lm").load_checkpoint(tmp_path / "checkpoint")


def test_a_critic_is_refused_as_a_language_model(critic: Path) -> None:
    for name in all_engines():
        with pytest.raises(ValueError, match=r"needs TrainerConfig\.head 'value', not 'lm'"):
            check_model(TrainerConfig(model=critic, engine=name))


@pytest.mark.seconds
@pytest.mark.parametrize(
    "build", [engine_param(name) for name in ENGINES if name != "bitwise"], indirect=True
)  # it packs
def test_an_engine_asked_forward_only_holds_its_parameters_only(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread's memory for logits is there for all its engines.
    monkeypatch.setattr(logprobs, "MEMORY", LogitsMemory(chunk_bytes=1 << 16))
    # Large enough that activations do not matter.
    model = tiny_llama(tmp_path / "model", hidden_size=256, intermediate_size=2048)
    gc.collect()
    with without_walking_what_exists():
        engine = build(model, "lm")
        size = sum(p.numel() * 4 for _, p in engine.hf_parameters())
        engine.forward([BATCH])
        engine.save_checkpoint(tmp_path / "checkpoint")
        engine.load_checkpoint(tmp_path / "checkpoint", weights_only=True)
        engine.load_checkpoint(tmp_path / "checkpoint")
        engine.forward([BATCH])
        assert _tensor_bytes() / size == pytest.approx(1, abs=0.1)
        engine.forward_backward([BATCH], get_loss("cross_entropy"))
        assert _tensor_bytes() / size == pytest.approx(2, abs=0.1)
        engine.optim_step(AdamParams(learning_rate=1e-3))
        assert _tensor_bytes() / size == pytest.approx(3, abs=0.1)


def _tensor_bytes() -> int:
    """Bytes of all tensors that Python can reach, but for those of objects that garbage collection passes over."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, torch.nn.Parameter)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
