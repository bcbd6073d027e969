"""Megatron's distributed optimizer (ZeRO-1, arXiv 1910.02054): parameters, of which each rank holds and steps a part.

The model keeps whole compute copies. The ranks that compute with the same copies divide the rows of each parameter
among them, and with these the accumulated gradient and the moments. Within a call, gradients are whole.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from trainer.engines.mcore.groups import RankGroups
from trainer.engines.mcore.masters import MasterSlice, MasterSlices, local
from trainer.engines.mcore.names import Piece


class ShardedMasters(MasterSlices):
    """The parameters of a model by Hugging Face name, of which this rank holds some rows."""

    _can_share = False

    def __init__(self, named: Sequence[tuple[nn.Parameter, Sequence[Piece]]], groups: RankGroups) -> None:
        """As `MasterSlices`, for several ranks."""
        self._whole: dict[str, Tensor] = {}  # the gradients of a call, by name
        super().__init__(named, groups)

    def refresh(self) -> None:
        """Gathers the compute copies after the parameters changed. A collective."""
        with torch.no_grad():
            for name, each in self._slices.items():
                copy = each.source.data[each.rows]
                own = local(self.parameters[name]).to(copy.dtype)
                group = self._group(each.piece)
                size = dist.get_world_size(group)
                share = _share(len(copy), size)
                gathered = copy if len(copy) == size * share else copy.new_empty(size * share, *copy.shape[1:])
                dist.all_gather_single(gathered, _padded(own, share), group=group)
                if gathered is not copy:
                    copy.copy_(gathered[: len(copy)])

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same parameter, and keeps this rank's rows. A collective.

        An expert to which no token came has a gradient of zeros, as if all experts of a layer were one parameter.
        """
        if not self._whole:
            return
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                each = self._slices[name]
                grad = self._whole.pop(name, None)
                if grad is None:
                    grad = torch.zeros(each.shape, device=parameter.device)
                if each.piece.sums_over_tensor_ranks:
                    dist.all_reduce(grad, group=self._groups.tensor)
                group = self._group(each.piece)
                size = dist.get_world_size(group)
                share = _share(len(grad), size)
                own = grad.new_empty(share, *grad.shape[1:])
                dist.reduce_scatter_single(own, _padded(grad, size * share), group=group)
                parameter.grad = each.wrap(own[: len(local(parameter))])

    def drop_gradients(self) -> None:
        self._whole.clear()

    def _new_local(self, each: MasterSlice) -> Tensor:
        group = self._group(each.piece)
        share, rank = _share(each.shape[0], dist.get_world_size(group)), dist.get_rank(group)
        start, stop = (min(n * share, each.shape[0]) for n in (rank, rank + 1))
        return torch.empty(stop - start, *each.shape[1:], device=each.source.device)

    def _add_gradient(self, each: MasterSlice, grad: Tensor) -> None:
        name = each.piece.name
        if name in self._whole:
            self._whole[name].add_(grad)
        else:
            self._whole[name] = grad

    def _data_placement(self) -> Placement:
        return Shard(0)

    def _group(self, piece: Piece) -> dist.ProcessGroup:
        """The ranks that divide a parameter."""
        return self._groups.expert_data if piece.is_expert else self._groups.data


def _share(num_rows: int, size: int) -> int:
    """Rows of each rank but the last ones, as DTensor divides them."""
    return -(-num_rows // size)


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with as many rows, contiguous."""
    if len(tensor) == num_rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(num_rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
