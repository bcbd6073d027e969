"""The bodies of `ops` on the CPU, which call the functions of `kernels.c`. Arguments are as `ops` prepares them."""

import torch
from torch import Tensor

from ownloop_bitwise.library import kernels
from ownloop_bitwise.operands import Packed, Sequences, is_bf16


def product(rows: Tensor, weight: Packed, bias: Tensor | None, out: Tensor) -> None:
    """As `ops.product`, of rows [M, K]."""
    kernels().product(
        *(rows.data_ptr(), weight.memory.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(len(rows), weight.num_outputs, weight.num_inputs, is_bf16(rows)),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    """As `ops.rms_norm`."""
    y, size = torch.empty_like(x), x.shape[-1]
    pointers = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    kernels().rms_norm(*pointers, x.numel() // size, size, eps, shift, is_bf16(x))
    return y


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """As `ops.soft_cap`."""
    y = torch.empty_like(x)
    kernels().soft_cap(x.data_ptr(), y.data_ptr(), x.numel(), cap, is_bf16(x))
    return y


def gate_mul(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    """As `ops.gate_mul`, of rows."""
    if gate.stride() != up.stride() or gate.stride(-1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape)
    pointers = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    kernels().gate_mul(*pointers, *gate.shape, gate.stride(0), int(gelu), is_bf16(gate))
    return y


def rotate(x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    """As `ops.rotate`, of dimensions i and i + D/2."""
    length, heads, size = x.shape
    if x.stride()[1:] != (size, 1):
        x = x.contiguous()
    positions = positions.to(torch.int64).contiguous()
    y = x.new_empty(length, heads, size)
    pointers = (x.data_ptr(), table.data_ptr(), positions.data_ptr(), y.data_ptr())
    kernels().rotate(*pointers, length, heads, size, x.stride(0), int(inverse), is_bf16(x))
    return y


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int, cap: float) -> Tensor:
    """As `ops.attend`."""
    (_, heads, size), groups = q.shape, k.shape[1]
    out = torch.zeros(q.shape, dtype=q.dtype)
    kernels().attend(
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        *(sequences.query_starts.data_ptr(), sequences.query_rows.data_ptr(), sequences.seen.data_ptr()),
        *(sequences.key_starts.data_ptr(), sequences.key_rows.data_ptr()),
        *(len(sequences.query_starts) - 1, heads, groups, size, k.stride(0), k.stride(1)),
        *(window, scale, cap, is_bf16(q)),
    )
    return out


def log_sum_exp(
    values: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None, mean: bool
) -> tuple[Tensor, Tensor | None]:
    """As `ops.log_sum_exp`."""
    lse, of = torch.empty(len(starts)), torch.empty(len(starts)) if mean else None
    kernels().log_sum_exp(
        *(values.data_ptr(), starts.data_ptr(), ends.data_ptr(), None if scale is None else scale.data_ptr()),
        *(lse.data_ptr(), None if of is None else of.data_ptr(), len(starts), is_bf16(values)),
    )
    return lse, of


def log_sum_exp_rows(logits: Tensor, scale: Tensor | None, mean: bool) -> tuple[Tensor, Tensor | None]:
    """As `ops.log_sum_exp_rows`."""
    starts = torch.arange(len(logits), dtype=torch.int64) * logits.shape[1]
    return log_sum_exp(logits, starts, starts + logits.shape[1], scale, mean)


def nucleus(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """As `ops.nucleus`."""
    counts = torch.empty(len(logits), dtype=torch.int64)
    kernels().nucleus(logits.data_ptr(), k.data_ptr(), p.data_ptr(), counts.data_ptr(), *logits.shape)
    return counts
