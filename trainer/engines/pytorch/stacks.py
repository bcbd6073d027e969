"""Weights of experts, which models stack and checkpoints name one by one.

torchtitan and transformers hold the weights of a layer's experts as one parameter per projection, or even for two
projections, while most checkpoints name the weights of each expert. Here an expert is a view of the stack, so nothing
is copied on load, push, checkpoint or export.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard  # pyright: ignore[reportPrivateUsage]

Views = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
"""A parameter, or a tensor of its shape, as views by the names of a checkpoint."""


def itself(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The `Views` of a parameter that has the checkpoint's name and shape."""
    yield name, tensor


def parameter_views(views: Views, name: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields a parameter by the names of a checkpoint. The gradient of a view, if any, is a view of the gradient."""
    grads = dict(views(name, parameter.grad)) if parameter.grad is not None else {}
    for part, view in views(name, parameter.detach()):
        if part == name:
            yield name, parameter
            return
        view.grad = grads.get(part)
        yield part, view


def moment_views(views: Views, name: str, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yields an optimizer's state of a parameter, as `parameter_views` yields the parameter. Views share the step."""
    parts = {key: dict(views(name, state[key])) for key in ("exp_avg", "exp_avg_sq")}
    for part in parts["exp_avg"]:
        yield part, {"step": state["step"], **{key: of_key[part] for key, of_key in parts.items()}}


def unstacked(stack: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields index and weight of each expert of which this rank holds a part. The stack may be plain or sharded."""
    if not isinstance(stack, DTensor):
        yield from enumerate(stack.unbind(0))
        return
    mesh, placements = stack.device_mesh, stack.placements
    names = mesh.mesh_dim_names
    assert names is not None
    _, (first, *_) = compute_local_shape_and_global_offset(stack.shape, mesh, placements)
    # Mesh axes over which whole experts are distributed do not shard a single expert.
    within = [(axis, _within_expert(p)) for axis, p in zip(names, placements, strict=True) if not _cuts(p, 0)]
    for index, local in enumerate(stack.to_local().unbind(0), start=first):
        if not within:
            yield index, local
            continue
        submesh = mesh[tuple(axis for axis, _ in within)]
        shape = stack.shape[1:]
        yield (
            index,
            DTensor.from_local(
                local, submesh, [p for _, p in within], run_check=False, shape=shape, stride=(shape[1], 1)
            ),
        )


def _cuts(placement: Placement, dim: int) -> bool:
    """Whether a placement shards that dimension."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _within_expert(placement: Placement) -> Placement:
    """The placement of one expert [., .] for a placement of the stack [E, ., .]."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim - 1)
    assert isinstance(placement, Replicate)
    return placement
