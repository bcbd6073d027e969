"""Copies between a GPU and weight memory, at the speed of the link between them.

Weights are cast before they travel, so that float32 never does. Copies are queued on the GPU, hundreds in one call and
without waiting for each, which is only possible if the host's memory is pinned: the GPU then reads and writes it by
itself.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly
_SUCCESS = 0

Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source, of equal shapes."""


def on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there are tensors and all are on a GPU."""
    places = [tensor.is_cuda for tensor in tensors]
    return bool(places) and all(places)


def copy(pairs: Iterable[Pair], batch_bytes: int = 256 << 20) -> None:
    """Copies each source into its destination, cast where the source lies. All have arrived when it returns.

    `batch_bytes` are cast at a time, and so need memory twice.
    """
    devices: set[torch.device] = set()
    for batch in _batches(pairs, batch_bytes):
        devices |= {tensor.device for pair in batch for tensor in pair if tensor.is_cuda}
        # Between GPUs the copy casts by itself, and only what it has cast travels.
        cast = [source if to.is_cuda and source.is_cuda else source.to(to.dtype) for to, source in batch]
        # The public way is one call of Python for each tensor; a mixture of experts has thousands.
        copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]
        copy_all([destination for destination, _ in batch], cast, non_blocking=True)
    for device in devices:  # by name, because threads other than the engine's have another current device
        torch.cuda.synchronize(device)


def pin(data: torch.Tensor, *, writable: bool) -> str:
    """Pins the host memory under a tensor of bytes. Returns why that failed, empty if it did not.

    To be called in a process that uses a GPU. Unpinned memory is as right, but several times as slow.
    """
    # Without the device, a thread would open a context on the first GPU, which belongs to another rank.
    with torch.cuda.device(int(os.environ.get("LOCAL_RANK", "0"))):
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        status = int(_runtime().cudaHostRegister(data.data_ptr(), data.nbytes, flags))
    return "" if status == _SUCCESS else f"CUDA refused to pin {data.nbytes / 1e9:.1f} GB (error {status})"


def unpin(data: torch.Tensor) -> None:
    """Undoes `pin`, which must come before the memory is unmapped."""
    with torch.cuda.device(int(os.environ.get("LOCAL_RANK", "0"))):
        _runtime().cudaHostUnregister(data.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()


def _batches(pairs: Iterable[Pair], max_bytes: int) -> Iterator[Sequence[Pair]]:
    """Pairs of at most `max_bytes` together, or one pair."""
    batch: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        if batch and num_bytes + pair[0].nbytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(pair)
        num_bytes += pair[0].nbytes
    if batch:
        yield batch
