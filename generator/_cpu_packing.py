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
# Memory that a thread keeps at most. Larger matrices, such as the output projection of a large model, are packed from
# where they lie.
_SCRATCH_BYTES = 128 << 20


def patch_packing() -> None:
    """Applies the patch. Calling it again does nothing."""
    if not isinstance(ops.create_onednn_mm, _PackFromCache):
        ops.create_onednn_mm = _PackFromCache(ops.create_onednn_mm)


class _Memory(threading.local):
    """The memory of one thread."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[torch.Size, torch.dtype], Tensor] = {}  # kept, because they take as long as a copy

    def like(self, weight: Tensor) -> Tensor:
        """Memory for a weight [K, N], the transpose of a matrix whose N rows are an odd number of cache lines apart."""
        view = self._views.get((weight.shape, weight.dtype))
        if view is None:
            width, num_rows = weight.shape
            num_lines = -(-width * weight.itemsize // _LINE_BYTES) | 1
            num_bytes = num_rows * num_lines * _LINE_BYTES
            with torch.inference_mode(False):  # what is made in that mode can be written to in no other
                if len(self._bytes) < num_bytes:
                    self._views.clear()
                    self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
                view = self._bytes[:num_bytes].view(weight.dtype).view(num_rows, -1)[:, :width].t()
            self._views[weight.shape, weight.dtype] = view
        return view


@dataclass(frozen=True, slots=True)
class _PackFromCache:
    """`create_onednn_mm`, which makes a packed copy of a matrix.

    Remove when `python -m benchmarks.weight_growth`, whose rows are multiples of 512 bytes, is as fast without it.
    """

    original: Callable[..., Any]
    memory: _Memory = field(default_factory=_Memory)

    def __call__(self, weight: Tensor, *arguments: Any, **options: Any) -> Any:
        """`weight` [K, N] is the transposed view of a matrix with N rows."""
        row_bytes = weight.stride(1) * weight.itemsize
        limit = _CACHED_BYTES if row_bytes % _CONFLICT_BYTES else _SCRATCH_BYTES
        if weight.stride(0) == 1 and row_bytes * weight.shape[1] <= limit:
            weight = self.memory.like(weight).copy_(weight)
        return self.original(weight, *arguments, **options)
