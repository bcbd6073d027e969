"""Failure sync: ranks tell each other that one of them failed.

Otherwise the other ranks would wait in a collective that the failed rank never joins.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.engines.base import RankFailureError

T = TypeVar("T")


class FailureSync:
    """Syncs failures between all ranks, at the cost of reducing one number. With a single rank it does nothing."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self._num_ranks = num_ranks
        self._device = device

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank. If it raises on one rank, the others raise RankFailureError. A collective."""
        try:
            result = work()
        except Exception:
            self.sync(failed=True)
            raise
        self.sync(failed=False)
        return result

    def sync(self, *, failed: bool) -> None:
        """Raises RankFailureError if another rank has failed and this one has not. A collective."""
        if self._num_ranks > 1:
            failures = torch.tensor(float(failed), device=self._device)
            dist.all_reduce(failures)
            if failures and not failed:
                raise RankFailureError("another rank failed in this call")
