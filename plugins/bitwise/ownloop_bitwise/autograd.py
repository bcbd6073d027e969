"""The kernels as functions with a gradient: forward passes are the kernels', backward passes are PyTorch's own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from ownloop_bitwise import ops
from trainer.engines.pytorch.low_rank import LowRank

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: ops.Packed) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return ops.product(x, packed, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        rows = grad.flatten(0, -2)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_weight = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: ops.Packed) -> Tensor:
    """x [..., K] -> [..., N]; `packed` is the packed weight [N, K]."""
    y: Tensor = _Linear.apply(x, weight, bias, packed)
    return y


class BitwiseLowRank(LowRank):
    """A layer's part of an adapter, as generators compute it: A and B in the dtype of x, and the scale in B."""

    @classmethod
    def of(cls, part: LowRank, dtype: torch.dtype) -> "BitwiseLowRank":
        """The same adapter for inputs of a dtype."""
        return cls(part.a.to(dtype), part.b.to(dtype) * part.scale, 1.0)

    def down(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., rank]"""
        return linear(x, self.a, None, ops.Packed.of(self.a))

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return linear(self.down(x), self.b, None, ops.Packed.of(self.b))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.shift = eps, shift
        return ops.rms_norm(x, weight, eps, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # With s = 1 / sqrt(mean(x^2) + eps), u = x s and h = grad (w + shift):
        # d/dx = s (h - u mean(h u))   and   d/dw = sum(grad u).
        x, weight = ctx.saved_tensors
        grad, wide = grads[0].float(), x.float()
        scale = (wide.square().mean(-1, keepdim=True) + ctx.eps).rsqrt_()
        unit = wide.mul_(scale) if wide is not x else wide * scale
        of_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        inner = grad * (weight.float() + ctx.shift)
        inner = inner.sub_(unit * (inner * unit).mean(-1, keepdim=True)).mul_(scale)
        return inner.to(x.dtype), of_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    """x [..., D] normalised, times weight [D] + shift."""
    y: Tensor = _RMSNorm.apply(x, weight, eps, shift)
    return y


class _GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gelu = gelu
        return ops.gate_mul(gate, up, gelu=gelu).view_as(gate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if ctx.gelu:
            of_gate = torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate="tanh")
            return of_gate, grads[0] * F.gelu(gate, approximate="tanh"), None
        return torch.ops.aten.silu_backward(grads[0] * up, gate), grads[0] * F.silu(gate), None


def gate_mul(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    """As `ops.gate_mul`."""
    y: Tensor = _GateMul.apply(gate, up, gelu)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, neighbours: bool) -> Tensor:
        ctx.table, ctx.positions, ctx.neighbours = table, positions, neighbours
        return ops.rotate(x.flatten(0, -3), table, positions, neighbours=neighbours).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, where = grads[0].contiguous(), (ctx.table, ctx.positions)
        turned = ops.rotate(grad.flatten(0, -3), *where, neighbours=ctx.neighbours, inverse=True)
        return turned.view_as(grad), None, None, None


def rotate(x: Tensor, table: Tensor, positions: Tensor, *, neighbours: bool) -> Tensor:
    """x [1, L, heads, D] at positions [L]; see `ops.rotate`."""
    y: Tensor = _Rotate.apply(x, table, positions, neighbours)
    return y


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: ops.Sequences,
        scale: float,
        window: int,
        cap: float,
        ordinary: Attention,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.ordinary = ordinary
        k, v = k.squeeze(0).contiguous(), v.squeeze(0).contiguous()
        return ops.attend(q.squeeze(0), k, v, sequences, scale, window, cap)[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.ordinary(*inputs)
        return *torch.autograd.grad(out, inputs, grads[0]), *(None,) * 5


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: ops.Sequences,
    scale: float,
    window: int,
    cap: float,
    ordinary: Attention,
) -> Tensor:
    """q [1, L, heads, D], k and v [1, L, groups, D] -> [1, L, heads, D]; `ordinary` computes the same in PyTorch."""
    y: Tensor = _Attend.apply(q, k, v, sequences, scale, window, cap, ordinary)
    return y
