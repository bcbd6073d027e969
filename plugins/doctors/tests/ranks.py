"""The script of the contract on several engine ranks, and what only these engines promise beyond it."""

import asyncio
import contextlib
import resource
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ownloop_doctors.comparisons import require_close
from ownloop_doctors.several_ranks import PARAMS, Build, layout_script
from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.weights.gpu import unreachable_gpus
from tests.stores import FakeStore
from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, whole
from trainer.push import WeightPublisher


def script(build: Build, config: TrainerConfig, rank: int, directory: Path) -> dict[str, Any]:
    """The contract's script, then a turn of a generator on GPUs, and a rank that has no room for its files."""
    engine = build(config)
    results = layout_script(lambda _: engine, config, rank, directory)
    if torch.cuda.is_available():
        leave_the_gpu(engine, config, rank, directory)
    notice_damage(engine, rank, directory)
    fail_to_write(engine, rank, config.num_ranks, directory)  # last: what pytest.raises caught keeps tensors
    return results


def leave_the_gpu(engine: Engine, config: TrainerConfig, rank: int, directory: Path) -> None:
    """All state leaves the GPU before a step and comes back, which changes no bit; a push finds memory of GPUs."""
    batch, after = random_batch(LENGTHS), list[dict[str, torch.Tensor]]()
    mine = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
    for leaves in (False, True):
        engine.load_checkpoint(directory / "checkpoint")
        engine.forward_backward(mine, get_loss("cross_entropy"))
        if leaves:
            parts = [p.to_local() if isinstance(p, DTensor) else p for _, p in engine.hf_parameters()]
            size, held = sum(part.nbytes for part in parts), torch.cuda.memory_allocated()
            del parts
            engine.to("cpu", model=True, gradients=True, optimizer=True)
            freed = held - torch.cuda.memory_allocated()
            assert freed >= 4 * size, f"{freed} bytes were freed; parameters, gradients, moments take {4 * size}"
            engine.to("cuda", model=True, gradients=True, optimizer=True)
        engine.optim_step(PARAMS, 0.01)
        after.append(whole(engine))
    require_close("parameters", after[1], after[0], 0.0)
    with no_space(applies=True):
        torch.empty(32 << 20, device="cuda")  # memory of a GPU is no file, not even of a pretended one
    publisher = WeightPublisher(torch.bfloat16, store=FakeStore())
    with warnings.catch_warnings():
        if not (apart := unreachable_gpus()):  # a push that goes another way warns why
            warnings.filterwarnings("error", message=".* carries the weights")
        record = asyncio.run(publisher.publish(3, engine.hf_parameters()))
    assert record is None or record.transport == "gpu_memory" or apart


def notice_damage(engine: Engine, rank: int, directory: Path) -> None:
    """A shard, which one rank reads whole, is not as it was written; every rank raises."""
    shard = min((directory / "checkpoint").glob("*.distcp"))
    content = shard.read_bytes() if rank == 0 else b""
    barrier()
    if rank == 0:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    barrier()
    with pytest.raises(ValueError, match=f"damaged: {shard.name} changed since the checkpoint was written"):
        engine.load_checkpoint(directory / "checkpoint")
    barrier()
    if rank == 0:
        shard.write_bytes(content)
    barrier()


def barrier() -> None:
    """Waits for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def fail_to_write(engine: Engine, rank: int, num_ranks: int, directory: Path) -> None:
    """One rank has no room for its files; every rank raises, and the checkpoint that was there stays."""
    with no_space(rank == num_ranks - 1), pytest.raises(OSError, match="checkpoint could not be written: rank"):
        engine.save_checkpoint(directory / "checkpoint")
    with no_space(rank == 0), pytest.raises(Exception, match="File too large"):
        engine.export_hf(directory / "export", torch.float32)
    assert engine.load_checkpoint(directory / "checkpoint") == 3


@contextlib.contextmanager
def no_space(applies: bool) -> Generator[None]:
    """Within the block, this process cannot write files of more than 100 bytes, if `applies`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if applies else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
