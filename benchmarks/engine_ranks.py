"""Engine ranks without actors, and what they are given and compared by: for benchmarks of engines, and their tests."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.tiny_models import VOCAB_SIZE
from rl.data.batching import BatchPlan, plan_batch
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engines.base import Engine

LENGTHS = (3, 17, 5, 40, 9, 23, 31)


def random_batch(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[Datum]:
    """One datum per length; the first third of each is not scored."""
    rng = np.random.default_rng(seed)
    batch: list[Datum] = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length + 1)
        weights = rng.uniform(0.5, 1.5, length).astype(np.float32)
        weights[: length // 3] = 0
        inputs: dict[str, NDArray[np.int64] | NDArray[np.float32]] = {
            "target_tokens": tokens[1:],
            "weights": weights,
            "logprobs": rng.normal(-4.0, 0.5, length).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
        }
        batch.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return batch


def critic_batch(lengths: Sequence[int], seed: int = 0) -> list[Datum]:
    """A `random_batch` with what a value loss needs."""
    rng = np.random.default_rng(seed)
    batch: list[Datum] = []
    for datum in random_batch(lengths, seed):
        inputs = {name: rng.normal(size=len(datum.tokens)).astype(np.float32) for name in ("old_values", "returns")}
        batch.append(Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, **inputs}))
    return batch


def plan(config: TrainerConfig, batch: list[Datum]) -> BatchPlan:
    """As the trainer's handle plans it."""
    return plan_batch(
        batch,
        num_ranks=config.num_data_parallel_ranks,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        share_prefixes=True,
    )


def spawn(num_ranks: int, body: Callable[..., None], *args: Any) -> None:
    """Runs `body(rank, *args)` in that many processes, set up for `load_engine`."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    torch.multiprocessing.spawn(_rank_main, args=(num_ranks, port, body, args), nprocs=num_ranks)


def _rank_main(rank: int, num_ranks: int, port: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    body(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def whole(engine: Engine, *, gradients: bool = False) -> dict[str, Tensor]:
    """Parameters, or their gradients, by name; those of all ranks, whole, on every rank."""
    mine = {name: p.grad if gradients else p for name, p in engine.hf_parameters()}
    gathered = {name: full(tensor) for name, tensor in mine.items() if tensor is not None}
    if not dist.is_initialized():
        return gathered
    ranks: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, gathered)
    return {name: tensor for rank in ranks for name, tensor in rank.items()}


def full(tensor: Tensor) -> Tensor:
    """A copy of all of a sharded tensor, or of one that is whole."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected."""
    return float((actual - expected).norm() / expected.norm())
