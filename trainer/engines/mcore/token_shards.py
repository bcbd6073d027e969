"""Sequence parallelism (arXiv 2205.05198): between matrix products a tensor-parallel rank holds a shard of the tokens.

A rank's shard is an equal part of the row, in the order of the ranks. The layers are those of Megatron-core, whose own
exchange allocates on CUDA only. Legend: L tokens of a row, T ranks, D and E sizes of a vector.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from trainer.engines.mcore import core_api


class ColumnLinear(core_api.ColumnParallelLinear):
    """Takes a shard of the tokens and returns this rank's columns of the product for all of them."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:  # noqa: A002 - Megatron-core's
        if not options["sequence_parallel"]:
            return super()._forward_impl(input, weight, **options)
        output: Any = _GatheredProduct.apply(input, weight, self.tp_group)
        return output if options["bias"] is None else output + options["bias"]


class RowLinear(core_api.RowParallelLinear):
    """Takes this rank's columns of all tokens and returns the product, summed over ranks, for its shard of them."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[L, 1, D / T] -> [L / T, 1, E], and the bias, which the caller adds."""
        if not self.sequence_parallel:
            return super().forward(input_)
        output: Any = _ReduceScatter.apply(F.linear(input_, self.weight), self.tp_group)
        return output, self.bias


def split_tokens(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L, ...], alike on all ranks -> [L / T, ...]. The gradient of the input is whole on every rank."""
    return core_api.copy_to_tensor_parallel_ranks(tokens, group).chunk(group.size())[group.rank()]


def gather_tokens(shard: Tensor, group: dist.ProcessGroup, *, sums_gradients: bool) -> Tensor:
    """[L / T, ...] -> [L, ...]. With `sums_gradients` each rank's gradient is a part of the sum, else it is the sum."""
    gathered: Any = _Gather.apply(shard, group, sums_gradients)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        return _all_gather(shard, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sums_gradients:
            return _reduce_scatter(grads[0], ctx.group), None, None
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()], None, None


class _ReduceScatter(torch.autograd.Function):
    """[L, ...] -> [L / T, ...], this rank's shard of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grads[0], ctx.group), None


class _GatheredProduct(torch.autograd.Function):
    """[L / T, 1, D] -> [L, 1, E], the tokens of all ranks times this rank's weight [E, D].

    Only the shard is kept for the backward pass, which gathers the tokens again while it multiplies.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(shard, weight)
        ctx.group = group
        return F.linear(_all_gather(shard, group), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight = ctx.saved_tensors
        tokens = shard.new_empty(len(grads[0]), *shard.shape[1:])
        gathering = dist.all_gather_single(tokens, shard.contiguous(), group=ctx.group, async_op=True)
        grad_tokens = grads[0] @ weight
        assert gathering is not None
        gathering.wait()
        grad_shard = torch.empty_like(shard)
        scattering = dist.reduce_scatter_single(grad_shard, grad_tokens, group=ctx.group, async_op=True)
        grad_weight = grads[0].flatten(0, 1).T @ tokens.flatten(0, 1)
        assert scattering is not None
        scattering.wait()
        return grad_shard, grad_weight, None


def _all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    dist.all_gather_single(whole, shard.contiguous(), group=group)
    return whole


def _reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    shard = parts.new_empty(len(parts) // group.size(), *parts.shape[1:])
    dist.reduce_scatter_single(shard, parts.contiguous(), group=group)
    return shard
