"""Host memory for the state of an engine that leaves the GPU for a while.

    GPU --- keep ---> pinned memory, used again at each offload --- mover(gpu) ---> GPU

A GPU copies to and from pinned memory at the speed of PCIe, and beside its computation. The driver takes other memory
through buffers of its own, at about a tenth of the speed. Pinning takes longer than a copy, so memory stays pinned.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rl.weights.copies import pin

HOST = torch.device("cpu")
_PIECE_BYTES = 64 << 20  # small tensors share pieces of this size; a larger tensor has one of its own
_ALIGNMENT = 512


class HostMemory:
    """Pinned memory that holds one part of an engine's state at a time. It lasts as long as the process."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0

    def mover(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function that copies tensors to `device`. On the host they replace what was copied there before.

        Copies to and from a GPU are queued on its current stream. Synchronize before the host reads a tensor.
        """
        if device != HOST:
            return functools.partial(Tensor.to, device=device, non_blocking=True)
        self._piece = self._used = 0
        return self.keep

    def keep(self, tensor: Tensor) -> Tensor:
        """Queues a copy of a tensor, or of a DTensor's local part, next to what is held. Tensors of the host stay."""
        if tensor.device == HOST:
            return tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        copy = self._room(local.nbytes).view(local.dtype).as_strided(local.shape, _dense_stride(local))
        copy.copy_(local, non_blocking=True)
        # The public constructor would move the local part to the mesh's device.
        return DTensor(copy, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else copy  # pyright: ignore

    def _room(self, num_bytes: int) -> Tensor:
        """Pinned memory (uint8 [num_bytes]) with arbitrary content."""
        while self._piece < len(self._pieces) and self._used + num_bytes > len(self._pieces[self._piece]):
            self._piece, self._used = self._piece + 1, 0
        if self._piece == len(self._pieces):
            piece = torch.empty(max(num_bytes, _PIECE_BYTES), dtype=torch.uint8)
            if problem := pin(piece, writable=True):
                print(f"offloading will be slow: {problem}", flush=True)
            self._pieces.append(piece)
        begin, self._used = self._used, self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._pieces[self._piece][begin : begin + num_bytes]


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides that a copy without gaps has."""
    return torch.empty_like(tensor, device="meta").stride()
