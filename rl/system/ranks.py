"""This process among the ranks of its mesh."""

from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def own_rank() -> int:
    """This process's rank; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in the order of ranks. A collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    values = cast("list[T]", [None] * dist.get_world_size(group))
    dist.all_gather_object(values, value, group=group)
    return values
