"""The kernels for torch tensors on the CPU, in float32 and bfloat16. No autograd: `autograd.py` has that.

What a function returns for a row is the same, bit by bit, whatever other rows there are, on however many threads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ownloop_bitwise.library import kernels

_LINE_BYTES = 64
Rows = NDArray[np.int64]


def _is_bf16(x: Tensor) -> int:
    assert x.dtype in (torch.float32, torch.bfloat16), x.dtype
    assert x.device.type == "cpu", x.device
    return int(x.dtype == torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [N, K] in the order in which the kernel reads it."""

    memory: Tensor
    """Bytes, from the beginning of a line of the cache on."""
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor) -> "Packed":
        """Packs a weight [N, K]."""
        weight = weight.detach().contiguous()
        (n, k), is_bf16 = weight.shape, _is_bf16(weight)
        memory = torch.empty(kernels().packed_bytes(n, k, is_bf16) + _LINE_BYTES, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % _LINE_BYTES :]
        kernels().pack(weight.data_ptr(), memory.data_ptr(), n, k, is_bf16)
        return cls(memory, n, k, weight.dtype)


def product(x: Tensor, weight: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [..., K] times a packed [N, K], plus a bias [N] -> [..., N], in `out` if that is given."""
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.shape[-1] == weight.num_inputs
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    bias = None if bias is None else bias.detach().to(x.dtype).contiguous()
    y = x.new_empty(*x.shape[:-1], weight.num_outputs) if out is None else out
    assert y.is_contiguous()
    kernels().product(
        *(rows.data_ptr(), weight.memory.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
        *(len(rows), weight.num_outputs, weight.num_inputs, _is_bf16(x)),
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * (weight [D] + shift)."""
    x, weight = x.contiguous(), weight.detach().to(x.dtype).contiguous()
    y, size = torch.empty_like(x), x.shape[-1]
    pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    kernels().rms_norm(*pointers, x.numel() // size, size, eps, shift, _is_bf16(x))
    return y


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels().soft_cap(x.data_ptr(), y.data_ptr(), x.numel(), cap, _is_bf16(x))
    return y


def gate_mul(gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
    """SiLU of gate [..., D], or its GELU by tanh, times up [..., D]. The two may be halves of one tensor."""
    size = gate.shape[-1]
    gate, up = gate.flatten(0, -2), up.flatten(0, -2)
    if gate.stride() != up.stride() or gate.stride(-1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape)
    pointers = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    kernels().gate_mul(*pointers, len(gate), size, gate.stride(0), int(gelu), _is_bf16(gate))
    return y


@cache
def rope_table(inverse_frequencies: tuple[float, ...], size: int) -> Tensor:
    """[size, D] float32: the cosines of D/2 angles, then their sines, from angles in float64."""
    with torch.inference_mode(False):  # the trainer's table may be made within it, and saved for a backward pass
        angles = torch.outer(torch.arange(size).double(), torch.tensor(inverse_frequencies, dtype=torch.float64))
        return torch.cat([angles.cos(), angles.sin()], -1).float().contiguous()


def rotate(x: Tensor, table: Tensor, positions: Tensor, *, neighbours: bool = False, inverse: bool = False) -> Tensor:
    """x [L, heads, D], whose heads are adjacent, at positions [L] -> [L, heads, D].

    Dimension i is rotated with i + D/2; with `neighbours`, 2i is with 2i + 1.
    """
    length, heads, size = x.shape
    if neighbours:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape)
    if x.stride()[1:] != (size, 1):
        x = x.contiguous()
    positions = positions.to(torch.int64).contiguous()
    y = x.new_empty(length, heads, size)
    pointers = (x.data_ptr(), table.data_ptr(), positions.data_ptr(), y.data_ptr())
    kernels().rotate(*pointers, length, heads, size, x.stride(0), int(inverse), _is_bf16(x))
    return y.unflatten(-1, (2, -1)).transpose(-1, -2).reshape(y.shape) if neighbours else y


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


def attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int = 0, cap: float = 0.0
) -> Tensor:
    """q [L, heads, D], k and v [rows, groups, D] views of equal strides -> [L, heads, D]; 0 for other queries.

    With a window, a query sees the last `window` of its keys alone; with a cap, scores go through `soft_cap`.
    """
    (_, heads, size), groups = q.shape, k.shape[1]
    q, out = q.contiguous(), torch.zeros(q.shape, dtype=q.dtype)
    assert k.stride() == v.stride()
    assert k.stride(2) == 1
    assert k.dtype == v.dtype == q.dtype
    kernels().attend(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        *(sequences.query_starts.data_ptr(), sequences.query_rows.data_ptr(), sequences.seen.data_ptr()),
        *(sequences.key_starts.data_ptr(), sequences.key_rows.data_ptr()),
        *(
            len(sequences.query_starts) - 1,
            heads,
            groups,
            size,
            k.stride(0),
            k.stride(1),
            window,
            scale,
            cap,
            _is_bf16(q),
        ),
    )
    return out


def log_sum_exp(
    values: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None = None, *, mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Of M rows of a memory of values: of each the elements from `starts` [M] to `ends` [M], times its scale [M].

    Returns the log of the sum of exponentials [M] float32 and, if asked for, the mean of the scaled elements under
    their softmax [M].
    """
    assert values.is_contiguous()
    starts, ends = starts.contiguous(), ends.contiguous()
    scale = None if scale is None else scale.float().contiguous()
    lse, of = torch.empty(len(starts)), torch.empty(len(starts)) if mean else None
    kernels().log_sum_exp(
        *(values.data_ptr(), starts.data_ptr(), ends.data_ptr(), None if scale is None else scale.data_ptr()),
        *(lse.data_ptr(), None if of is None else of.data_ptr(), len(starts), _is_bf16(values)),
    )
    return lse, of


def log_sum_exp_rows(
    logits: Tensor, scale: Tensor | None = None, *, mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`log_sum_exp` of whole rows of logits [M, V]."""
    logits = logits.contiguous()
    starts = torch.arange(len(logits), dtype=torch.int64) * logits.shape[1]
    return log_sum_exp(logits, starts, starts + logits.shape[1], scale, mean=mean)


def nucleus(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """How many tokens of each row to keep: the fewest of the first k [M] that have probability p [M] among these.

    `logits` [M, K] are float32 and fall along each row. At least one token is kept, and none whose logit is -inf.
    """
    assert logits.dtype == torch.float32
    logits, k, p = logits.contiguous(), k.to(torch.int64).contiguous(), p.float().contiguous()
    counts = torch.empty(len(logits), dtype=torch.int64)
    kernels().nucleus(logits.data_ptr(), k.data_ptr(), p.data_ptr(), counts.data_ptr(), *logits.shape)
    return counts
