"""The host in place of GPUs: memory that other processes open by a handle, and pairs that take what the other sends."""

import mmap
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar

import pytest
import torch

from rl.weights.buffer import GPUPart
from rl.weights.links import LinkError
from rl.weights.versions import WeightsError


class HostSharing:
    """A `MemorySharing` whose handles are "pid/fd" of anonymous files."""

    largest_by_default: ClassVar[int] = 1 << 40
    refused: ClassVar[bool] = False
    """Whether memory of others cannot be opened."""

    def why_not(self) -> str:
        return ""

    def why_not_by_default(self, num_bytes: int) -> str:
        return "too large" if num_bytes > self.largest_by_default else ""

    def allocate(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, GPUPart]:
        fd = os.memfd_create("stand-in")
        os.truncate(fd, num_bytes)
        part = GPUPart(begin, num_bytes, f"GPU-{os.getpid()}", f"{os.getpid()}/{fd}".encode(), os.getpid())
        return self.open(part), part

    def open(self, part: GPUPart) -> torch.Tensor:
        pid, fd = part.handle.decode().split("/")
        if self.refused and int(pid) != os.getpid():
            raise WeightsError(f"{part.gpu} is out of reach")
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)

    def close(self, memory: torch.Tensor, *, owned: bool) -> None:
        del memory, owned

    def wait(self) -> None:
        pass


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


def use_host_for_gpus(patch: pytest.MonkeyPatch) -> None:
    """Has transports between GPUs work in this process without any."""
    patch.setattr("rl.weights.gpu_memory.CUDASharing", HostSharing)
    patch.setattr("rl.weights.nccl.NCCLLink.maker", HostPairs())
