"""The float32 parameters of a Megatron-core model by Hugging Face name, each a slice of a parameter of the model.

In float32 they share the memory of the model's parameters. In another dtype the model's parameters are compute copies,
and these are the master weights. A gradient goes to the slices as soon as the backward pass has computed it. With
several ranks, slices are DTensors.

`ShardedMasters` is Megatron's distributed optimizer (ZeRO-1, arXiv 1910.02054). The model keeps whole compute copies.
The ranks that compute with the same copies divide the rows of each parameter among them, and with these the accumulated
gradient and the moments. Within a call, gradients are whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ownloop_megatron.mcore.groups import RankGroups
from ownloop_megatron.mcore.names import Piece
from trainer.engines.pytorch.engine_state import HostMemory


@dataclass(frozen=True, slots=True)
class MasterSlice:
    """Where a parameter lies."""

    source: nn.Parameter
    rows: slice
    shape: torch.Size
    """The shape of these rows."""
    piece: Piece
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]

    def wrap(self, local: Tensor) -> Tensor:
        """This rank's part as a DTensor if there is a mesh."""
        if self.mesh is None:
            return local
        shape = list(self.shape)
        if self.piece.sharded_dim is not None:
            shape[self.piece.sharded_dim] *= self.mesh["tensor"].size()
        stride = (1,) if len(shape) == 1 else (shape[1], 1)
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


class MasterSlices:
    """The parameters of a model by Hugging Face name."""

    _can_share = True
    """Whether a parameter in float32 can be the model's own."""

    def __init__(self, named: Sequence[tuple[nn.Parameter, Sequence[Piece]]], groups: RankGroups) -> None:
        """`named` are the model's parameters, each with its pieces. Nothing is loaded yet."""
        self._groups = groups
        self._host = HostMemory()
        self._slices: dict[str, MasterSlice] = {}
        for source, pieces in named:
            of_source = [self._slice(source, piece) for piece in pieces]
            # pieces of one parameter have different names
            self._slices |= {each.piece.name: each for each in of_source}
        self._shapes = {id(source): source.shape for source, _ in named}
        self._shared = self._can_share and all(source.dtype == torch.float32 for source, _ in named)
        with torch.no_grad():
            self.parameters: dict[str, nn.Parameter] = {
                name: nn.Parameter(each.wrap(self._new_local(each))) for name, each in self._slices.items()
            }
        for source, pieces in named:
            # frees the model's gradient as soon as it is there
            source.register_post_accumulate_grad_hook(partial(self._take_gradient, pieces))

    def refresh(self) -> None:
        """Recasts the compute copies after the parameters changed."""
        if self._shared:
            return
        with torch.no_grad():
            for name, each in self._slices.items():
                each.source[each.rows].copy_(local(self.parameters[name]))

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the parameters to `device`. Compute copies exist only while that is `compute_device`."""
        sources = {id(each.source): each.source for each in self._slices.values()}.values()
        move = self._host.mover(device)
        with torch.no_grad():
            for source in sources:
                if self._shared:
                    source.data = move(source.data)
            for name, each in self._slices.items():
                master = self.parameters[name]
                own = each.source.data[each.rows] if self._shared else move(local(master))
                # `wrap` would move it to the mesh's device
                moved = DTensor(own, master._spec, requires_grad=False) if isinstance(master, DTensor) else own  # pyright: ignore
                torch.utils.swap_tensors(master, nn.Parameter(moved))
            for source in sources:
                if not self._shared:
                    # size 0 frees the memory
                    source.data = source.new_empty(self._shapes[id(source)] if device == compute_device else (0,))
        if device == compute_device:
            self.refresh()

    def reduce_gradients(self) -> None:
        """Sums gradients over the ranks that hold the same parameter. A collective.

        An expert to which no token came has a gradient of zeros, as if all experts of a layer were one parameter.
        """
        if all(parameter.grad is None for parameter in self.parameters.values()):
            return
        pending: list[dist.Work | None] = []
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                piece = self._slices[name].piece
                groups = [self._groups.expert_data] if piece.is_expert else [self._groups.data]
                if piece.sums_over_tensor_ranks:
                    groups.append(self._groups.tensor)
                groups = [group for group in groups if dist.get_world_size(group) > 1]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                for group in groups:
                    if len(groups) > 1:  # the second sum needs the first
                        dist.all_reduce(local(parameter.grad), group=group)
                    else:
                        pending.append(dist.all_reduce(local(parameter.grad), group=group, async_op=True))
        for work in pending:
            assert work is not None
            work.wait()

    def drop_gradients(self) -> None:
        """Drops gradients that are kept elsewhere than in the parameters."""

    def _new_local(self, each: MasterSlice) -> Tensor:
        """This rank's part of a new parameter."""
        own = each.source.data[each.rows]
        return own if self._shared else own.float()

    def _take_gradient(self, pieces: Sequence[Piece], source: Tensor) -> None:
        """Adds a gradient of the model to the gradients of its slices, and frees it."""
        assert source.grad is not None
        grad = source.grad.float()  # in float32 before the first sum
        source.grad = None
        with torch.no_grad():
            for piece in pieces:
                each = self._slices[piece.name]
                self._add_gradient(each, grad[each.rows])

    def _add_gradient(self, each: MasterSlice, grad: Tensor) -> None:
        """Adds a float32 gradient, which may be kept, to a parameter's."""
        parameter = self.parameters[each.piece.name]
        if parameter.grad is None:
            parameter.grad = each.wrap(grad)
        else:
            local(parameter.grad).add_(grad)

    def _data_placement(self) -> Placement:
        """How parameters lie on the ranks that compute with the same ones."""
        return Replicate()

    def _slice(self, source: nn.Parameter, piece: Piece) -> MasterSlice:
        rows = slice(piece.start * len(source) // piece.parts, piece.stop * len(source) // piece.parts)
        mesh = None
        placements: tuple[Placement, ...] = ()
        if self._groups.is_distributed:
            mesh = self._groups.expert_mesh if piece.is_expert else self._groups.dense_mesh
            placements = (self._data_placement(),)
            if not piece.is_expert:
                sharded = piece.sharded_dim
                placements = (Replicate() if sharded is None else Shard(sharded), *placements)
        return MasterSlice(source, rows, source.data[rows].shape, piece, mesh, placements)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_name(slices: MasterSlices) -> Mapping[str, Tensor]:
    """The parameters without their gradients."""
    return {name: parameter.data for name, parameter in slices.parameters.items()}


class ShardedMasters(MasterSlices):
    """The parameters of a model by Hugging Face name, of which this rank holds some rows."""

    _can_share = False

    def __init__(self, named: Sequence[tuple[nn.Parameter, Sequence[Piece]]], groups: RankGroups) -> None:
        """Takes what `MasterSlices` takes, and the groups of ranks that share it."""
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
                # a last share may be short, and collectives take equal ones
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
