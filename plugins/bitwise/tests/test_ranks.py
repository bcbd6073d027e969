"""Ranks that share their parameters compute the same bits as one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import SERVABLE, random_batch, tiny_dense
from rl.types import AdamParams
from tests.trainer.adapters import load_engine_or_adapter
from trainer.config import TrainerConfig
from trainer.engines.contract.plain_ranks import LENGTHS, plan, spawn

pytestmark = pytest.mark.ranks


def _logprobs(config: TrainerConfig, rank: int = 0) -> dict[int, bytes]:
    """By datum of this rank: of a forward pass, of one with gradients, and after a step that changes no weight."""
    engine, batch = load_engine_or_adapter(config), random_batch(LENGTHS)
    mine = config.data_parallel_rank(rank)
    planned = plan(config, batch)
    local = planned.split(batch)[mine]
    passes = [engine.forward(local).logprobs]
    passes.append(engine.forward_backward(local, get_loss("cross_entropy")).logprobs)
    engine.optim_step(AdamParams(learning_rate=0.0), 0.01)
    passes.append(engine.forward(local).logprobs)
    indices = [i for microbatch in planned.microbatches[mine] for i in microbatch]
    return {index: b"".join(each[k].tobytes() for each in passes) for k, index in enumerate(indices)}


def _write(rank: int, config: TrainerConfig, folder: Path) -> None:
    torch.save(_logprobs(config, rank), folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"data_parallel_shard": 2}),
        pytest.param("gemma2", {"data_parallel_shard": 2}, marks=pytest.mark.slow),
        pytest.param(
            *("qwen3", {"data_parallel_replicate": 2, "activation_checkpointing": "full"}), marks=pytest.mark.slow
        ),
        ("qwen3", {"data_parallel_shard": 2, "lora": LoRAConfig(rank=4)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_ranks_compute_what_one_does(dtype: Any, family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_dense(family, tmp_path / "model", **SERVABLE)
    config = TrainerConfig(
        model=model, engine="bitwise", compute_dtype=dtype, max_tokens_per_microbatch=50, lora=options.get("lora")
    )
    alone = _logprobs(config)
    spawn(2, _write, replace(config, **options), tmp_path)
    found: list[dict[int, bytes]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(found)
    assert {**found[0], **found[1]} == alone
