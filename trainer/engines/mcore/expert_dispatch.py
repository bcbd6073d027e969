"""Expert parallelism for rows of different lengths: all tokens of a group are gathered, each rank computes its experts.

Megatron-core's own gather wants equally many tokens on every rank and CUDA. This one pads and works on any device.
Legend: N most tokens of any rank, R ranks of the group, D size of a vector.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.engines.mcore import core_api


class RaggedDispatcher(core_api.MoEAllGatherTokenDispatcher):
    """Gathers the tokens of ranks that may have different numbers of them."""

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[n, D] tokens and [n, experts] scores of this rank -> [R N, D] and [R N, experts] of all ranks."""
        if self.ep_size == 1:
            return hidden_states, probs
        longest = torch.tensor(len(hidden_states), device=hidden_states.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.ep_group)
        self._num_tokens, self._longest = len(hidden_states), int(longest)
        # Scores of padding are zeros and its routing map is false, so it goes to no expert.
        self.routing_map = self._gather(self.routing_map.to(probs.dtype)) > 0
        return self._gather(hidden_states), self._gather(probs)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[R N, D] contributions of this rank's experts to all tokens -> [n, D] sums for this rank's tokens."""
        if self.ep_size == 1:
            return hidden_states
        start = dist.get_rank(self.ep_group) * self._longest
        combined: Any = _Combine.apply(hidden_states, start, start + self._num_tokens, self.ep_group)
        return combined

    def _gather(self, tokens: Tensor) -> Tensor:
        gathered: Any = _Gather.apply(tokens, self._longest, self.ep_group)
        return gathered


class _Gather(torch.autograd.Function):
    """[n, D] -> [R N, D]. Every rank's loss depends on all of it, so gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, longest: int, group: dist.ProcessGroup) -> Tensor:
        start = dist.get_rank(group) * longest
        ctx.region, ctx.group = slice(start, start + len(tokens)), group
        everyone = tokens.new_zeros(dist.get_world_size(group) * longest, *tokens.shape[1:])
        everyone[ctx.region] = tokens
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.region], None, None


class _Combine(torch.autograd.Function):
    """[R N, D] -> [n, D], the sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, start: int, stop: int, group: dist.ProcessGroup) -> Tensor:
        ctx.region, ctx.group, ctx.shape = slice(start, stop), group, parts.shape
        total = parts.clone()
        dist.all_reduce(total, group=group)
        return total[ctx.region]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].new_zeros(ctx.shape)
        grad[ctx.region] = grads[0]
        dist.all_reduce(grad, group=ctx.group)
        return grad, None, None, None
