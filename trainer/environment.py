"""The environment of the trainer's processes. Loads no torch: the controller needs it before it starts them."""

import os

from rl.system.hardware import cpu_malloc_env, cpu_thread_env, sees_gpu
from trainer.config import TrainerConfig

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # what a user has set stays


def trainer_env(config: TrainerConfig, *, has_gpu: bool | None = None) -> dict[str, str]:
    """Environment variables of each trainer process, to be set before it imports anything.

    `has_gpu` says whether the host that computes has a GPU; None stands for this host.
    """
    env = cpu_thread_env(config.num_threads)
    if not (sees_gpu() if has_gpu is None else has_gpu):
        env |= cpu_malloc_env()  # saves a quarter of the time of a small model's step
    elif not os.environ.keys() & set(_ALLOCATOR):
        # Every row has another length; without this, freed blocks fit no later row and memory falls to pieces.
        env[_ALLOCATOR[0]] = "expandable_segments:True"
    return env
