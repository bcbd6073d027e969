"""Ranks tell each other that they failed, so that none waits for another in a collective that will not come."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.engines.base import RankFailureError

T = TypeVar("T")


class FailureSync:
    """The ranks of one trainer. Every method is a collective, and nothing for a single rank."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self._num_ranks = num_ranks
        self._device = device

    def do(self, work: Callable[[], T]) -> T:
        """Does something that may raise; on the other ranks RankFailureError is raised then."""
        try:
            result = work()
        except Exception:
            self.tell(failed=True)
            raise
        self.tell(failed=False)
        return result

    def tell(self, *, failed: bool) -> None:
        """Raises RankFailureError when another rank has failed."""
        if self._num_ranks > 1:
            failures = torch.tensor(float(failed), device=self._device)
            dist.all_reduce(failures)
            if failures and not failed:
                raise RankFailureError("another rank failed in this call")
