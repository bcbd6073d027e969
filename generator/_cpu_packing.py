"""Patch of vLLM that has oneDNN pack weights out of the cache, with its reason and the condition for its removal.

oneDNN reads dozens of rows of a matrix side by side when it packs it. Main memory is slow at that, and where rows are a
multiple of 1 KB apart, as they are in most models, they have to share a few lines of the cache: packing takes three
times as long. Here a matrix is first copied, in one sweep, to rows that are an odd number of cache lines apart.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm._custom_ops as ops
from torch import Tensor

_LINE_BYTES = 64
_CONFLICT_BYTES = 1 << 10
# Larger matrices do not stay in the cache, so that a copy pays only where their rows would get into each other's way.
_CACHED_BYTES = 8 << 20
# Memory that a thread keeps at most. Larger matrices, which only the output projection of a large model is, are packed
# from where they lie.
_SCRATCH_BYTES = 128 << 20


def patch_packing() -> None:
    """Applies the patch. Calling it again does nothing."""
    if not isinstance(ops.create_onednn_mm, _PackFromCache):
        ops.create_onednn_mm = _PackFromCache(ops.create_onednn_mm)


@dataclass(frozen=True, slots=True)
class _PackFromCache:
    """`create_onednn_mm`, which makes a packed copy of a matrix.

    Remove when `python -m benchmarks.weight_growth`, whose rows are multiples of 512 bytes, is as fast without it.
    """

    original: Callable[..., Any]
    memory: threading.local = field(default_factory=threading.local)

    def __call__(self, weight: Tensor, *arguments: Any, **options: Any) -> Any:
        """`weight` [K, N] is the transposed view of a matrix with N rows."""
        return self.original(self._staged(weight.t()).t(), *arguments, **options)

    def _staged(self, rows: Tensor) -> Tensor:
        """The matrix [N, K] in this thread's memory, or where it lies."""
        num_rows, width = rows.shape
        num_lines = -(-width * rows.itemsize // _LINE_BYTES) | 1
        num_bytes = num_rows * num_lines * _LINE_BYTES
        conflicts = rows.stride(0) * rows.itemsize % _CONFLICT_BYTES == 0
        if rows.stride(1) != 1 or num_bytes > (_SCRATCH_BYTES if conflicts else _CACHED_BYTES):
            return rows
        memory: Tensor | None = getattr(self.memory, "scratch", None)
        if memory is None or len(memory) < num_bytes:
            self.memory.scratch = memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory[:num_bytes].view(rows.dtype).view(num_rows, -1)[:, :width].copy_(rows)
