"""The table of operations that trainer and generator share, in float32 and bfloat16. No autograd: `autograd.py` has it.

Each operation has two bodies, and the device of its tensors chooses: `cpu.py` calls `kernels.c`, and `cuda.py` calls
vLLM's batch-invariant kernels. What a function returns for a row is the same, bit by bit, whatever other rows there
are. The two devices have different bits.
"""

from typing import Any

import torch
from torch import Tensor

from ownloop_bitwise import cpu
from ownloop_bitwise.operands import Packed, Sequences


def _bodies(x: Tensor) -> Any:
    """The module that computes on the device of a tensor."""
    if x.device.type == "cpu":
        return cpu
    from ownloop_bitwise import cuda  # imports vLLM, which a trainer on the CPU does without

    return cuda


def product(x: Tensor, weight: Packed, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [..., K] times a packed [N, K], plus a bias [N] -> [..., N], in `out` if that is given."""
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.shape[-1] == weight.num_inputs
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    bias = None if bias is None else bias.detach().to(x.dtype).contiguous()
    y = x.new_empty(*x.shape[:-1], weight.num_outputs) if out is None else out
    assert y.is_contiguous()
    _bodies(x).product(rows, weight, bias, y)
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps) * (weight [D] + shift)."""
    return _bodies(x).rms_norm(x.contiguous(), weight.detach().to(x.dtype).contiguous(), eps, shift)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap)"""
    return _bodies(x).soft_cap(x.contiguous(), cap)


def gate_mul(gate: Tensor, up: Tensor, *, gelu: bool = False) -> Tensor:
    """SiLU of gate [..., D], or its GELU by tanh, times up [..., D]. The two may be halves of one tensor."""
    return _bodies(gate).gate_mul(gate.flatten(0, -2), up.flatten(0, -2), gelu)


def rotate(x: Tensor, table: Tensor, positions: Tensor, *, neighbours: bool = False, inverse: bool = False) -> Tensor:
    """x [L, heads, D], whose heads are adjacent, at positions [L] -> [L, heads, D].

    Dimension i is rotated with i + D/2; with `neighbours`, 2i is with 2i + 1.
    """
    if neighbours:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape)
    y: Tensor = _bodies(x).rotate(x, table, positions, inverse)
    return y.unflatten(-1, (2, -1)).transpose(-1, -2).reshape(y.shape) if neighbours else y


def attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float, window: int = 0, cap: float = 0.0
) -> Tensor:
    """q [L, heads, D], k and v [rows, groups, D] views of equal strides -> [L, heads, D]; 0 for other queries.

    With a window, a query sees the last `window` of its keys alone; with a cap, scores go through `soft_cap`.
    """
    assert k.stride() == v.stride()
    assert k.stride(2) == 1
    assert k.dtype == v.dtype == q.dtype
    return _bodies(q).attend(q.contiguous(), k, v, sequences, scale, window, cap)


def log_sum_exp(
    values: Tensor, starts: Tensor, ends: Tensor, scale: Tensor | None = None, *, mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Of M rows of a memory of values: of each the elements from `starts` [M] to `ends` [M], times its scale [M].

    Returns the log of the sum of exponentials [M] float32 and, if asked for, the mean of the scaled elements under
    their softmax [M].
    """
    assert values.is_contiguous()
    scale = None if scale is None else scale.float().contiguous()
    return _bodies(values).log_sum_exp(values, starts.contiguous(), ends.contiguous(), scale, mean)


def log_sum_exp_rows(
    logits: Tensor, scale: Tensor | None = None, *, mean: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`log_sum_exp` of whole rows of logits [M, V]."""
    scale = None if scale is None else scale.float().contiguous()
    return _bodies(logits).log_sum_exp_rows(logits.contiguous(), scale, mean)


def nucleus(logits: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """How many tokens of each row to keep: the fewest of the first k [M] that have probability p [M] among these.

    `logits` [M, K] are float32, lie on the CPU and fall along each row. At least one token is kept, and none whose
    logit is -inf. On a GPU vLLM cuts; the tokens that it keeps are recorded.
    """
    assert logits.dtype == torch.float32
    return cpu.nucleus(logits.contiguous(), k.to(torch.int64).contiguous(), p.float().contiguous())
