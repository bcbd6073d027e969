"""The host in place of GPUs: memory that other processes open by a handle."""

import mmap
import os
from pathlib import Path
from typing import ClassVar

import torch

from rl.weights.memory import GPUPart
from rl.weights.version import WeightsError


class HostSharing:
    """In place of `CUDASharing`; its handles are "pid/fd" of anonymous files."""

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
