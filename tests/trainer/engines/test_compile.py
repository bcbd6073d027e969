"""Compiled layers compute the same gradients; on the CPU, with attention left as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import plan, relative_error, spawn, whole

pytestmark = pytest.mark.slow  # compiling takes a minute

LENGTHS = (3, 17, 5, 40)


def config(model: Path, **options: Any) -> TrainerConfig:
    return TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, **options)


def gradients(of: TrainerConfig, rank: int = 0) -> dict[str, torch.Tensor]:
    """Of two calls whose rows have different lengths and numbers of documents."""
    engine = load_engine(of)
    batch = random_batch(LENGTHS)
    for datums in (batch[:1], batch[1:]):
        engine.forward_backward(plan(of, datums).split(datums)[of.data_parallel_rank(rank)], get_loss("cross_entropy"))
    assert of.compile == (counters["stats"]["unique_graphs"] > 0), "what is compared is compiled"
    return whole(engine, gradients=True)


def two_ranks(rank: int, model: Path, directory: Path) -> None:
    result = gradients(config(model, compile=True, data_parallel_shard=2, activation_checkpointing="full"), rank)
    if rank == 0:
        torch.save(result, directory / "gradients.pt")


def test_compiled_layers_have_the_same_gradients(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    expected = gradients(config(model))
    spawn(2, two_ranks, model, tmp_path)
    for actual in (gradients(config(model, compile=True)), torch.load(tmp_path / "gradients.pt")):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert relative_error(actual[name], tensor) <= 1e-5, name
