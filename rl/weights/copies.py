"""Copies of hundreds of tensors into and out of weight memory, on a GPU or on all threads of a CPU; what changed.

On a GPU, weights are cast before they travel, so that float32 never does. The copies are queued, hundreds in one call
and without waiting for each, which is only possible if the host's memory is pinned: the GPU then reads and writes it
by itself.

On a CPU, torch splits each operation among its threads and joins them again. That takes 70 microseconds, as long as
copying one of a model's hundreds of tensors. Each thread of `Workers` runs whole operations, one after the other.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import torch

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly

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
        # Between GPUs the copy casts by itself, and only the result travels.
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
        error = call_cuda("cudaHostRegister", ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.nbytes), flags)
    return f"CUDA refused to pin {data.nbytes / 1e9:.1f} GB: {error}" if error else ""


def unpin(data: torch.Tensor) -> None:
    """Undoes `pin`, which must come before the memory is unmapped."""
    with torch.cuda.device(int(os.environ.get("LOCAL_RANK", "0"))):
        call_cuda("cudaHostUnregister", ctypes.c_void_p(data.data_ptr()))


def cuda_runtime() -> ctypes.CDLL:
    """CUDA's runtime as torch has loaded it. A second one in the process would have contexts and errors of its own."""
    return ctypes.CDLL(None)


def call_cuda(function: str, *arguments: Any) -> str:
    """The name of a call's error, empty if it succeeds. CUDA would keep it, and torch raise it after a later kernel."""
    cuda = cuda_runtime()
    if not (status := getattr(cuda, function)(*arguments)):
        return ""
    cuda.cudaGetLastError()
    cuda.cudaGetErrorName.restype = ctypes.c_char_p
    return cuda.cudaGetErrorName(status).decode()


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


# vLLM replaces the public function.
_set_num_threads = torch._C.set_num_threads  # pyright: ignore[reportPrivateUsage]
_PIECE_BYTES = 8 << 20  # larger tensors are cut, so that no thread is left with a long copy at the end


class Workers:
    """As many threads as torch uses in this process. They end with the process, or when this object is collected."""

    def __init__(self) -> None:
        """The number of threads is the calling thread's `torch.get_num_threads()`."""
        self._num_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            self._pool = ThreadPoolExecutor(self._num_threads, "weights", initializer=use_one_thread)
            all_here = threading.Barrier(self._num_threads)
            wait([self._pool.submit(all_here.wait) for _ in range(self._num_threads)])
            _set_num_threads(self._num_threads)  # of this thread, and of those to come

    def run(self, operations: Iterable[Callable[[], object]]) -> None:
        """Runs all operations, in any order. The longest should come first. Raises the error of one that fails."""
        operations = list(operations)
        if self._pool is None or len(operations) < 2:
            with torch.no_grad():
                for operation in operations:
                    operation()
        else:
            self._share(operations)

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each (destination, source) pair of equal shapes, and casts. Large ones are cut along dim 0."""
        self.run(self.copies(pairs))

    def copies(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Callable[[], object]]:
        """The operations of `copy`, which can be run any number of times."""
        pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for destination, source in pairs:
            num_pieces = -(-destination.nbytes // _PIECE_BYTES)
            if num_pieces > 1 and self._pool is not None:
                pieces += zip(destination.chunk(num_pieces), source.chunk(num_pieces), strict=True)
            else:
                pieces.append((destination, source))
        pieces.sort(key=lambda piece: piece[0].nbytes, reverse=True)
        return [partial(destination.copy_, source) for destination, source in pieces]

    def _share(self, operations: Iterable[Callable[[], object]]) -> None:
        assert self._pool is not None
        left = deque(operations)

        def work() -> None:
            with torch.no_grad():
                while True:
                    try:
                        operation = left.popleft()
                    except IndexError:
                        return
                    operation()

        working = [self._pool.submit(work) for _ in range(self._num_threads)]
        for future in wait(working).done:
            future.result()


def use_one_thread() -> None:
    """Makes torch's operations run in this thread alone."""
    torch.get_num_threads()  # a thread takes the number of the whole process when torch first looks for it there
    _set_num_threads(1)


_BLOCK = 1 << 16  # pairs of bytes, whose places in it are two bytes each
_SAMPLE = 61  # words of which one is looked at first; odd, so that samples lie in all columns


def changes_of(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """What turns `old` into `new` (uint8 [N] both), as uint8 [n]; None if that is hardly less.

    Counts of changed pairs of bytes, int32 for each block of 65,536 pairs; their places in their blocks, and their
    values, two bytes each.
    """
    # NumPy, here and below: it finds what is not zero, and picks it, in a third of torch's time.
    word = next((each for each in (np.uint64, np.uint32, np.uint16) if len(new) % each().nbytes == 0), None)
    if word is None:
        return None
    ours, theirs = new.numpy().view(word), old.numpy().view(word)
    if 2 * np.count_nonzero(ours[::_SAMPLE] != theirs[::_SAMPLE]) > len(ours) // _SAMPLE + 1:
        return None
    words = np.flatnonzero(ours != theirs)  # a pair of bytes is looked at only where a whole word has changed
    values, per_word = ours[words], ours.itemsize // 2
    pairs = np.flatnonzero((values ^ theirs[words]).view(np.uint16) != 0)
    places = pairs + per_word * (words - np.arange(len(words)))[pairs // per_word]
    ends = np.searchsorted(places, _BLOCK * np.arange(_num_blocks(new) + 1))
    # A cast to uint16 keeps a place's last 16 bits.
    found = [np.diff(ends).astype(np.int32), places.astype(np.uint16), values.view(np.uint16)[pairs]]
    changes = np.concatenate([each.view(np.uint8) for each in found])
    return torch.from_numpy(changes) if len(changes) < len(new) else None


def apply_changes(changes: torch.Tensor, data: torch.Tensor) -> None:
    """Turns `old` into `new`, in place; see `changes_of`. Raises ValueError for changes that are none of `data`."""
    size = 4 * _num_blocks(data)
    counts = changes[:size].numpy().view(np.uint32)
    if len(changes) != size + 4 * int(counts.sum(dtype=np.int64)):
        raise ValueError(f"{len(changes)} bytes of changes are no changes of {len(data)} bytes")
    within, values = changes[size:].numpy().view(np.uint16).reshape(2, -1)
    data.numpy().view(np.uint16)[np.repeat(_BLOCK * np.arange(len(counts)), counts) + within] = values


def _num_blocks(data: torch.Tensor) -> int:
    return -(-len(data) // (2 * _BLOCK))
