"""Runs an engine's ranks as plain processes, without actors: to check a new engine, or one layout against another.

It is here because tests, benchmarks and authors of engines all compare engines this way.
"""

import faulthandler
import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.data.batching import BatchPlan, plan_batch
from rl.system.ranks import all_gather
from rl.types import Datum
from trainer.config import TrainerConfig
from trainer.engine_table import all_engines
from trainer.engines.base import Engine

LENGTHS = (3, 17, 5, 40, 9, 23, 31)
"""Tokens of the datums that layouts are compared on: very different, and no multiple of any number of ranks."""

_PRELOADED = (
    *(entry.engine.partition(":")[0] for entry in all_engines().values()),
    "rl.tiny_models",
    "trainer.push",
    # Without these, each process would import them for its first DTensor, checkpoint or pipeline.
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def plan(config: TrainerConfig, batch: list[Datum]) -> BatchPlan:
    """Splits a batch over ranks and micro-batches as the trainer's handle does."""
    return plan_batch(
        batch,
        num_ranks=config.num_data_parallel_ranks,
        max_tokens_per_microbatch=config.max_tokens_per_microbatch,
        share_prefixes=True,
    )


def spawn(num_ranks: int, body: Callable[..., None], *args: object, timeout_s: float = 500) -> None:
    """Runs `body(rank, *args)` in `num_ranks` processes in which `load_engine` finds its rank and the others.

    Without a GPU, the processes are forked from a server that has imported the engines once, which takes longer than
    most bodies do. Importing them initializes CUDA, which a fork cannot use.

    Raises torch's ProcessRaisedException with the traceback of the first rank that fails, and TimeoutError if they take
    longer than `timeout_s` seconds. In both cases every rank has ended.
    """
    with socket.socket() as held:  # it does not listen: torch can take its port, and the kernel gives it to nobody else
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        # CUDA cannot be used in a forked process
        method = "spawn" if torch.cuda.is_available() else preloaded_forkserver().get_start_method()
        ranks = torch.multiprocessing.start_processes(
            _rank_main, (num_ranks, port, body, args), nprocs=num_ranks, join=False, start_method=method
        )
        assert ranks is not None
        processes: list[BaseProcess] = ranks.processes  # pyright: ignore[reportAssignmentType]  # torch says None
        deadline = time.monotonic() + timeout_s
        while not ranks.join(timeout=1):
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
                    process.join()
                raise TimeoutError(f"{num_ranks} ranks took longer than {timeout_s:g} s and were ended")


def preloaded_forkserver() -> ForkServerContext:
    """Makes processes that are forked from the server of `spawn`. A Python process has one such server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _rank_main(rank: int, num_ranks: int, port: int, body: Callable[..., None], args: tuple[object, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    faulthandler.enable()  # a rank that native code kills says where it was
    gc.freeze()  # all that the server imported, which the collector would walk, and so copy, in every rank
    torch.set_num_threads(1)
    body(rank, *args)
    if dist.is_initialized():  # an engine that refuses the layout has not connected its ranks
        dist.barrier()  # no rank ends while another waits for it
        dist.destroy_process_group()


def whole(engine: Engine, *, gradients: bool = False) -> dict[str, Tensor]:
    """All parameters, or their gradients, by name: gathered from all ranks and unsharded, on every rank."""
    # gradients may be None on other stages
    mine = {name: p.grad if gradients else p for name, p in engine.hf_parameters()}
    gathered = {name: full(tensor) for name, tensor in mine.items() if tensor is not None}
    return {name: tensor for of_rank in all_gather(gathered) for name, tensor in of_rank.items()}


def full(tensor: Tensor) -> Tensor:
    """A copy of a tensor in the host's memory, unsharded if it was sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of `expected`."""
    return float((actual - expected).norm() / expected.norm())
