"""What the operations of `ops` take beside tensors: packed weights, sequences of attention, tables of rotations."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ownloop_bitwise.library import kernels

_LINE_BYTES = 64
Rows = NDArray[np.int64]


def is_bf16(x: Tensor) -> int:
    """Whether a CPU tensor is bfloat16, for the kernels."""
    assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
    assert x.device.type == "cpu", x.device
    return int(x.dtype == torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K] in the order in which the kernel reads it."""

    memory: Tensor
    """Bytes, from the beginning of a line of the cache on. On a GPU, the weight itself."""
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor) -> "Packed":
        """Packs a weight [N, K]."""
        weight = weight.detach().contiguous()
        n, k = weight.shape
        if weight.device.type != "cpu":
            return cls(weight, n, k, weight.dtype)
        narrow = is_bf16(weight)
        memory = torch.empty(kernels().packed_bytes(n, k, narrow) + _LINE_BYTES, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % _LINE_BYTES :]
        kernels().pack(weight.data_ptr(), memory.data_ptr(), n, k, narrow)
        return cls(memory, n, k, weight.dtype)


@cache
def rope_table(inverse_frequencies: tuple[float, ...], size: int, device: torch.device | None = None) -> Tensor:
    """[size, D] float32: the cosines of D/2 angles, then their sines, from angles in float64 on the CPU."""
    with torch.inference_mode(False):  # the trainer's table may be made within it, and saved for a backward pass
        angles = torch.outer(torch.arange(size).double(), torch.tensor(inverse_frequencies, dtype=torch.float64))
        return torch.cat([angles.cos(), angles.sin()], -1).float().contiguous().to(device)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which keys each query sees. Queries and keys are named by their rows in memory. All arrays are int64."""

    query_starts: Tensor
    """[S + 1] where the queries of each sequence begin."""
    query_rows: Tensor
    """[L]"""
    seen: Tensor
    """[L] how many of its sequence's first keys a query sees."""
    key_starts: Tensor
    """[S + 1] where the keys of each sequence begin."""
    key_rows: Tensor
    """The keys, of each sequence in the order of their positions."""
    pages: Tensor | None = None
    """[S, most] int32: the keys of each sequence, then any others. Only on a GPU."""

    @classmethod
    def of(cls, queries: Sequence[Rows], seen: Sequence[Rows], keys: Sequence[Rows]) -> "Sequences":
        """Of each sequence: its queries, how many keys each of them sees, and its keys."""

        def starts(parts: Sequence[Rows]) -> Tensor:
            return torch.tensor([0, *itertools.accumulate(map(len, parts))], dtype=torch.int64)

        def joined(parts: Sequence[Rows]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64))

        return cls(starts(queries), joined(queries), joined(seen), starts(keys), joined(keys))

    @classmethod
    def of_pages(cls, query_starts: Tensor, lengths: Tensor, pages: Tensor, page_size: int) -> "Sequences":
        """Of S sequences whose last tokens are the queries, in order, and whose keys lie in pages.

        `query_starts` [S + 1]; `lengths` [S] of the sequences with their queries; `pages` [S, most] the pages of each
        sequence's keys, in order.
        """
        starts, sizes = query_starts.to(torch.int64), lengths.to(torch.int64)
        key_starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        rows = torch.arange(int(starts[-1]))
        seen = rows + torch.repeat_interleave(sizes - starts[1:], starts.diff()) + 1
        owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        place = torch.arange(int(key_starts[-1])) - key_starts[owner]
        keys = pages[owner, place // page_size].to(torch.int64) * page_size + place % page_size
        return cls(starts.contiguous(), rows, seen, key_starts, keys)

    def to(self, device: torch.device) -> "Sequences":
        """On the device that computes."""
        if device.type == "cpu":
            return self
        counts = self.key_starts.diff()
        filled = torch.arange(int(counts.max())) < counts[:, None]
        pages = torch.zeros(filled.shape, dtype=torch.int32)
        pages[filled] = self.key_rows.to(torch.int32)
        names = (each.name for each in fields(self) if each.name != "pages")
        return replace(self, pages=pages.to(device), **{name: getattr(self, name).to(device) for name in names})
