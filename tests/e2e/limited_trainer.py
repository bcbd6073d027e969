"""A trainer's rank whose GPU can be filled, so that it runs out of memory alone."""

import os
from typing import Any

import torch
from monarch.actor import endpoint

from rl.weights.gpu import CUDASharing
from trainer.actor import PolicyTrainer

_UNIT = 2 << 20  # bytes in which CUDA gives memory
_taken: list[torch.Tensor] = []


def leave(num_bytes: int) -> None:
    """Leaves this process's GPU so little memory: the rest is taken, apart from torch's allocator."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] // _UNIT * _UNIT - num_bytes
    if free > 0:
        _taken.append(CUDASharing().allocate(0, free)[0])


class LimitedTrainer(PolicyTrainer):
    """The rank."""

    @endpoint
    async def leave(self, num_bytes: int | None) -> None:
        """As the function; None gives the memory back."""
        while _taken:
            CUDASharing().close(_taken.pop(), owned=True)
        if num_bytes is not None:
            leave(num_bytes)


def leaves_no_memory(logprobs: torch.Tensor, entropy: Any, inputs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss whose backward pass has no memory on rank 0."""
    del entropy, inputs
    if os.environ["RANK"] == "0":
        leave(0)
    return -logprobs.sum(), {}
