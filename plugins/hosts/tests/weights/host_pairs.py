"""The host in place of GPUs: pairs that take what the other end sends."""

import uuid
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import ClassVar

import torch

from ownloop_hosts.weights.links import LinkError


class HostPairs:
    """A `Maker` of pairs within this process."""

    queues: ClassVar[dict[bytes, SimpleQueue[torch.Tensor | None]]] = {}
    pairs: ClassVar[list["QueuePair"]] = []
    why_nots: ClassVar[Iterator[str]] = iter(())

    def why_not(self, device: int | None) -> str:
        del device  # all are the host
        return next(self.why_nots, "")

    def new_id(self) -> bytes:
        made = uuid.uuid4().bytes * 8
        self.queues[made] = SimpleQueue()
        return made

    def make(self, pair_id: bytes, rank: int, timeout_s: float) -> "QueuePair":
        self.pairs.append(QueuePair(self.queues[pair_id], rank, timeout_s))
        return self.pairs[-1]


class QueuePair:
    """An end of a queue, which ends with None."""

    device = torch.device("cpu")

    def __init__(self, queue: SimpleQueue[torch.Tensor | None], rank: int, timeout_s: float) -> None:
        self.queue, self.rank, self.timeout_s = queue, rank, timeout_s
        self.num_calls = self.fails_at = 0
        self.has_ended = False

    def send(self, data: torch.Tensor) -> None:
        self._count()
        self.queue.put(data.clone())

    def receive(self, into: torch.Tensor) -> None:
        self._count()
        try:
            data = self.queue.get(timeout=self.timeout_s)
        except Empty:
            data = None
        if data is None:
            raise LinkError("the other end is gone")
        into.copy_(data)

    def interrupt(self) -> None:
        self.queue.put(None)

    def end(self) -> None:
        self.has_ended = True
        self.queue.put(None)

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise LinkError("a cable was pulled")
