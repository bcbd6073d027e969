"""Experts that are given with the data, against transformers with the same experts, in float32."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ownloop_doctors.comparisons import require_close, sampled_otherwise
from ownloop_families.tiny import TINY_FAMILIES
from rl.losses import get_loss
from rl.system.hf_config import experts_of, read_config
from rl.tiny_models import tiny_qwen3_moe
from rl.types import Datum
from tests.trainer.engine_params import engine_param
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import ReferencePolicy, gradients, importance_sampling, random_groups, routed

BATCH = random_groups([(9, (4, 9, 3)), (12, (5, 5))], vocab_size=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("routes")
    qwen3_moe = tiny_qwen3_moe(folder / "qwen3_moe", num_hidden_layers=3)
    return {"qwen3_moe": qwen3_moe, "gpt_oss": TINY_FAMILIES["gpt_oss"][1](folder / "gpt_oss")}


NAMES = ("torchtitan qwen3_moe", "megatron qwen3_moe", "torchtitan gpt_oss")


@pytest.fixture(params=map(engine_param, NAMES))
def config(request: pytest.FixtureRequest, models: Mapping[str, Path]) -> TrainerConfig:
    engine, name = request.param.split()
    return TrainerConfig(model=models[name], engine=engine, compute_dtype="float32")


@pytest.fixture
def model(config: TrainerConfig) -> Path:
    return config.model


@pytest.fixture
def engine(config: TrainerConfig) -> Engine:
    return load_engine(config)


def _own(model: Path, batch: list[Datum]) -> list[Datum]:
    """The datums with the experts that transformers chooses."""
    reference = ReferencePolicy(model).model
    found: list[Datum] = []
    for datum in batch:
        with torch.no_grad():
            scores = reference(torch.from_numpy(datum.tokens)[None], output_router_logits=True).router_logits
        ids = np.stack([layer.topk(2).indices.numpy() for layer in scores], axis=1)
        found.append(replace(datum, routes=ids.astype(np.uint16)))
    return found


def test_given_experts_compute_every_token(engine: Engine, model: Path) -> None:
    batch = routed(sampled_otherwise(BATCH), experts_of(read_config(model)))
    reference = ReferencePolicy(model)
    for scores in (engine.forward([batch]).logprobs, [engine.forward([[d]]).logprobs[0] for d in batch]):
        for datum, actual in zip(batch, scores, strict=True):
            expected = reference.logprobs(datum).detach().numpy() * (datum.weights != 0)
            np.testing.assert_allclose(actual, expected, atol=1e-5)
    engine.forward_backward([batch], get_loss("importance_sampling"))
    reference.backward(batch, importance_sampling)
    require_close("gradients", gradients(engine), reference.gradients(), 1e-5)
    engine.zero_grad()


def test_own_experts_change_nothing(engine: Engine, model: Path) -> None:
    """Siblings whose experts differ are computed apart, so that rounding may differ."""
    found: list[dict[str, torch.Tensor]] = []
    for batch in (BATCH, _own(model, BATCH)):
        engine.forward_backward([batch], get_loss("importance_sampling"))
        found.append({name: gradient.clone() for name, gradient in gradients(engine).items()})
        engine.zero_grad()
    require_close("gradients", found[1], found[0], 1e-5)


def test_experts_of_a_call_are_forgotten(engine: Engine, model: Path) -> None:
    before = engine.forward([BATCH]).logprobs
    given = engine.forward([routed(BATCH, experts_of(read_config(model)))]).logprobs
    assert max(np.abs(a - b).max() for a, b in zip(before, given, strict=True)) > 0.1
    for a, b in zip(before, engine.forward([BATCH]).logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
