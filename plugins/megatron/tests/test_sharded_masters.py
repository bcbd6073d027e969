"""Megatron's distributed optimizer: each rank steps its rows of every parameter, and all compute with whole copies.

Against one rank of `torchtitan`, its layouts are in test_sharded_engine.py.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ownloop_megatron.mcore.masters import local
from rl.losses import LossInputs, get_loss
from rl.losses.shared import LossFunction
from rl.tiny_models import random_batch, tiny_qwen3
from rl.types import AdamParams
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, spawn, whole

pytest.importorskip("megatron.core")

pytestmark = pytest.mark.ranks

LOSS = get_loss("cross_entropy")
BATCH = random_batch(LENGTHS)


def _config(model: Path, dtype: str, **degrees: int) -> TrainerConfig:
    options: dict[str, Any] = {"compute_dtype": dtype, "moments_dtype": dtype, **degrees}
    return TrainerConfig(model=model, engine="megatron", max_tokens_per_microbatch=50, **options)


def _failing_late() -> LossFunction:
    """A loss that raises on one rank, for the second row, when the first one has left gradients."""
    rows = itertools.count()

    def loss(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        del entropy, inputs
        if next(rows) == 1 and dist.get_rank() == 1:
            raise ArithmeticError("the second row")
        return -logprobs.sum(), {}

    return loss


def _trained(rank: int, config: TrainerConfig) -> Engine:
    """After three steps of two calls each, of which one more fails."""
    engine = load_engine(config)
    local_batch = plan(config, BATCH).split(BATCH)[config.data_parallel_rank(rank)]
    for _ in range(3):
        engine.forward_backward(local_batch, LOSS)
        with pytest.raises((ArithmeticError, RuntimeError)):
            engine.forward_backward(local_batch, get_loss(_failing_late()))
        engine.forward_backward(local_batch, LOSS)
        engine.optim_step(AdamParams(learning_rate=1e-3, beta2=0.95), 0.01)
    engine.forward_backward(local_batch, LOSS)
    return engine


def _rank(rank: int, model: Path, folder: Path) -> None:
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for degree in ("data_parallel_replicate", "data_parallel_shard"):
            engine = _trained(rank, _config(model, dtype, **{degree: 2}))
            results[f"{degree} {dtype}"] = {**whole(engine), **_renamed(whole(engine, gradients=True))}
            parameters = dict(engine.hf_parameters())
            own = {name: local(parameter).shape for name, parameter in parameters.items()}
            of_gradients = {name: local(p.grad).shape for name, p in parameters.items() if p.grad is not None}
            assert of_gradients == own
            shapes: list[Any] = [None, None]
            dist.all_gather_object(shapes, own)
            results[f"{degree} shapes"] = shapes
    if rank == 0:
        torch.save(results, folder / "results.pt")


def _renamed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"gradient of {name}": gradient for name, gradient in gradients.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks got."""
    folder = tmp_path_factory.mktemp("sharded")
    spawn(2, _rank, tiny_qwen3(folder / "model", tied=False), folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_that_of_whole_replicas(results: dict[str, Any], dtype: str) -> None:
    # The sum of two addends does not depend on their order.
    expected, actual = (results[f"data_parallel_{how} {dtype}"] for how in ("replicate", "shard"))
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def test_a_rank_holds_its_rows_only(results: dict[str, Any]) -> None:
    (whole_shapes, _), (first, second) = (results[f"data_parallel_{how} shapes"] for how in ("replicate", "shard"))
    for name, (rows, *others) in whole_shapes.items():
        assert (first[name][0], second[name][0]) == (-(-rows // 2), rows // 2), name
        assert list(first[name][1:]) == others
