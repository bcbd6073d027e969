"""Agreement among the ranks of a trainer or a generator on what they publish or load."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rl.weights.versions import WeightsError

T = TypeVar("T")

CANNOT_PUBLISH = "trainer rank {rank} could not publish its weights"


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
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_on_every_rank(problem: Exception | None, message: str, group: dist.ProcessGroup | None = None) -> None:
    """A barrier that raises on all ranks if one has a problem, so that no rank waits for a rank that gave up.

    The rank with the problem raises it; the others raise `WeightsError` with `message`, which names `{rank}`.
    """
    problems = all_gather(str(problem) if problem is not None else None, group)
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise WeightsError(f"{message.format(rank=rank)}: {text}")


async def on_rank_0(work: Callable[[], Awaitable[T]]) -> T:
    """What rank 0's work for a push returns, on every rank. Raises on all ranks if it fails. A collective."""
    result: Any = None
    problem: Exception | None = None
    try:
        result = await work() if own_rank() == 0 else None
    except Exception as error:  # of any kind, because the other ranks wait to hear of it
        problem = error
    text = None if problem is None else str(problem)
    text, result = (await asyncio.to_thread(all_gather, (text, result)))[0]
    if problem is not None:
        raise problem
    if text is not None:
        raise WeightsError(f"{CANNOT_PUBLISH.format(rank=0)}: {text}")
    return result
