"""Adapters on two ranks where they differ most from a whole model: interleaved, in bfloat16, and without a layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from tests.trainer.adapters import randomize
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole

pytestmark = pytest.mark.ranks

HEAD = LoRAConfig(rank=3, train_attn=False, train_mlp=False)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[LoRAConfig, ...], float]] = {
    "pipeline": ({"pipeline_parallel": 2}, (LoRAConfig(rank=4),), 1e-5),
    "tensor": ({"tensor_parallel": 2}, (HEAD, LoRAConfig(rank=5), LoRAConfig(rank=2, train_mlp=False)), 1e-5),
    "bfloat16": ({"data_parallel_shard": 2, "compute_dtype": "bfloat16"}, (LoRAConfig(rank=4),), 2e-2),
}
"""Options, adapters, and how much gradients may differ from one rank's."""


def run(config: TrainerConfig, adapters: tuple[LoRAConfig, ...], rank: int = 0) -> list[dict[str, Tensor]]:
    """Gradients of interleaved adapters after two calls each, then their parameters after a step."""
    frozen = load_engine(config)
    engines = [randomize(frozen.adapter(f"a{index}", lora), index) for index, lora in enumerate(adapters)]
    for seed in range(2):
        for index, engine in enumerate(engines):
            batch = random_batch(LENGTHS, 10 * index + seed)
            mine = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
            engine.forward_backward(mine, get_loss("cross_entropy"))
    results = [whole(engine, gradients=True) for engine in engines]
    for engine in engines:
        engine.optim_step(AdamParams(learning_rate=1e-3, eps=1e-4), 0.01)
    frozen.drop_adapter("a0")
    return results + [whole(engine) for engine in engines]


def two_ranks(rank: int, config: TrainerConfig, directory: Path) -> None:
    for name, (options, adapters, _) in LAYOUTS.items():
        results = run(replace(config, **options), adapters, rank)
        if rank == 0:
            torch.save(results, directory / name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainerConfig, Path]:
    """The configuration of one rank, and where two ranks left their results."""
    path = tmp_path_factory.mktemp("adapters")
    model = tiny_llama(path / "model", tied=False)
    config = TrainerConfig(model=model, compute_dtype="float32", max_tokens_per_microbatch=50, lora=LoRAConfig())
    spawn(2, two_ranks, config, path)
    return config, path


@pytest.mark.parametrize("layout", [pytest.param("pipeline", marks=pytest.mark.slow), "tensor", "bfloat16"])
def test_two_ranks_compute_what_one_computes(directory: tuple[TrainerConfig, Path], layout: str) -> None:
    config, path = directory
    options, adapters, tolerance = LAYOUTS[layout]
    many = torch.load(path / layout)
    one = run(replace(config, compute_dtype=options.get("compute_dtype", "float32")), adapters)
    assert len(many) == len(one) == 2 * len(adapters)
    for actual, expected in zip(many, one, strict=True):
        assert actual.keys() == expected.keys()
        assert max(relative_error(actual[name], expected[name]) for name in expected) <= tolerance
