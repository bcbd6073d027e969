"""Training goes on in another layout, and weights are published from it, as if nothing had changed."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from tests.stores import FakeStore, living, read_buffer
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import plan, relative_error, spawn, whole
from trainer.push import WeightPublisher

pytestmark = pytest.mark.ranks

LENGTHS = (3, 17, 5, 40, 9, 23, 31)
PIPELINE = {"pipeline_parallel": 2, "pipeline_schedule": "Interleaved1F1B"}
FSDP = {"data_parallel_shard": 2}
TENSOR = {"tensor_parallel": 2}


def config(model: Path, layout: dict[str, Any]) -> TrainerConfig:
    return TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, **layout)


def train(engine: Engine, of: TrainerConfig, steps: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Parameters afterwards."""
    batch = random_batch(LENGTHS)
    for _ in range(steps):
        engine.forward_backward(plan(of, batch).split(batch)[of.data_parallel_rank(rank)], get_loss("cross_entropy"))
        engine.optim_step(AdamParams(learning_rate=1e-3), 0.01)
    return whole(engine)


def published(engine: Engine) -> dict[str, torch.Tensor]:
    """What a generator would be given, on rank 0."""
    store = FakeStore()
    publisher = WeightPublisher(torch.float32, "shared_memory", store=store)
    asyncio.run(publisher.publish(engine.policy_version, engine.hf_parameters()))
    if dist.get_rank():
        return {}
    return read_buffer(living(store)[-1])


def bfloat16_logprobs(of: TrainerConfig) -> dict[str, torch.Tensor]:
    """By datum, before and after a step."""
    engine, batch = load_engine(of), random_batch(LENGTHS)
    local_batch = plan(of, batch).split(batch)[0]
    first = engine.forward_backward(local_batch, get_loss("cross_entropy"))
    engine.optim_step(AdamParams(learning_rate=1e-3), 0.01)
    logprobs = (*first.logprobs, *engine.forward(local_batch).logprobs)
    return {str(index): torch.from_numpy(array) for index, array in enumerate(logprobs)}


def two_ranks(rank: int, model: Path, directory: Path) -> None:
    """One rank -> PP 2 -> (one rank), and one rank -> FSDP 2 -> TP 2, a step in each."""
    results: dict[str, Any] = {}
    for name, layout, start in (
        ("pipeline", PIPELINE, "one"),
        ("fsdp", FSDP, "one"),
        ("tensor", TENSOR, "fsdp"),
    ):
        of = config(model, layout)
        engine = load_engine(of)
        engine.load_checkpoint(directory / start)
        results[name] = train(engine, of, 1, rank)
        engine.save_checkpoint(directory / name)
        results[f"{name} published"] = published(engine)
    results["bfloat16"] = bfloat16_logprobs(replace(config(model, PIPELINE), compute_dtype="bfloat16"))
    if rank == 0:
        torch.save(results, directory / "results.pt")


Results = tuple[Path, Path, dict[str, dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Model, where checkpoints are, what two ranks saw, and one rank's parameters after 2, 3, 4 steps."""
    directory = tmp_path_factory.mktemp("layouts")
    model = tiny_llama(directory / "model", tied=False, num_hidden_layers=4)
    of = config(model, {})
    engine = load_engine(of)
    expected = [train(engine, of, 2)]
    engine.save_checkpoint(directory / "one")
    expected += [train(engine, of, 1), train(engine, of, 1)]
    spawn(2, two_ranks, model, directory)
    return model, directory, torch.load(directory / "results.pt"), expected


def worst(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("layout", "step"), [("pipeline", 1), ("fsdp", 1), ("tensor", 2)])
def test_a_step_after_the_change_is_the_step_without_it(results: Results, layout: str, step: int) -> None:
    _, _, many, one = results
    assert worst(many[layout], one[step]) <= 1e-5
    assert worst(one[step], one[step - 1]) > 1e-3, "a step changes something"


@pytest.mark.parametrize("layout", ["pipeline", "fsdp", "tensor"])
def test_all_weights_are_published(results: Results, layout: str) -> None:
    _, _, many, _ = results
    assert worst(many[f"{layout} published"], many[layout]) == 0


def test_a_pipeline_computes_in_bfloat16_as_one_rank_does(results: Results) -> None:
    model, _, many, _ = results
    one = bfloat16_logprobs(replace(config(model, {}), compute_dtype="bfloat16"))
    assert one.keys() == many["bfloat16"].keys()
    for index, expected in one.items():
        torch.testing.assert_close(many["bfloat16"][index], expected, atol=0.1, rtol=0)


def test_one_rank_takes_over_from_a_pipeline(results: Results) -> None:
    model, directory, many, one = results
    of = config(model, {})
    engine = load_engine(of)
    assert engine.load_checkpoint(directory / "pipeline") == 3
    assert worst(whole(engine), many["pipeline"]) == 0
    assert worst(train(engine, of, 1), one[2]) <= 1e-5
