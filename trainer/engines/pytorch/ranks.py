"""This process as one rank of a trainer: its device, its process group and the dtypes to compute in."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from rl.system.disk import cache_directory
from trainer.config import TrainerConfig

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_device() -> torch.device:
    """This rank's accelerator, or the CPU, on which equal calls give equal gradients from here on.

    By default the threads of a CPU add the gradients of a row that was taken more than once, as mixtures take tokens,
    in the order in which they happen to come.
    """
    if not torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        # By default it also fills all new memory, which costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    _keep_compiled_code()
    return device


def _keep_compiled_code() -> None:
    """Has torch compile once, and not after every reboot: by default what it compiles is in /tmp."""
    folder = cache_directory() / "inductor"
    with contextlib.suppress(OSError):  # the cache may be read-only
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def init_process_group(config: TrainerConfig, device: torch.device, *, alone: bool = False) -> None:
    """Connects this rank with the others; with `alone`, makes a process group of a single rank too.

    Raises ValueError if WORLD_SIZE is not the layout's number of ranks.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.num_ranks:
        raise ValueError(
            f"the layout asks for {config.num_ranks} ranks (pipeline_parallel {config.pipeline_parallel} x "
            f"data_parallel_replicate {config.data_parallel_replicate} x "
            f"data_parallel_shard {config.data_parallel_shard} x context_parallel {config.context_parallel} x "
            f"tensor_parallel {config.tensor_parallel}); WORLD_SIZE is {world_size}"
        )
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if world_size > 1 and not dist.is_initialized():
        # The controller finds a rank that hangs, sooner and with its stack; NCCL's 10 minutes would end a long export.
        dist.init_process_group(backend, timeout=timedelta(seconds=config.deadlines.first_s))
    elif alone and not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
