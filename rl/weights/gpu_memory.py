"""The transport between GPUs of one host: trainer ranks cast into memory of their GPUs, and generators copy from there.

No byte passes through the host. Each trainer rank has a part of the buffer on its own GPU, whole tensors, and writes
its shards of other tensors into the parts of others. A generator's ranks copy the slices they need from all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl.weights import gpu_copies
from rl.weights.buffer import BufferLocation
from rl.weights.gpu_buffer import GPUBuffer, cut
from rl.weights.gpu_sharing import CUDASharing, GPUPart, MemorySharing
from rl.weights.manifest import LIVING_VERSIONS, Manifest, WeightsError
from rl.weights.ranks import CANNOT_PUBLISH, all_gather, raise_on_every_rank
from rl.weights.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender
from rl.weights.version_index import VersionIndex


class GPUMemory(SharedMemory):
    """A record's `location` is a `BufferLocation` with `gpu_parts`."""

    fallback_notice = "memory of GPUs carries the weights"

    def __init__(self, sharing: MemorySharing | None = None) -> None:
        """`sharing` is CUDA's by default."""
        self._sharing = sharing or CUDASharing()

    def suits(self, *, other_hosts: bool) -> bool:
        """Only if all generators are on the trainer's host, and there is CUDA."""
        return not other_hosts and not self._sharing.why_not()

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "GPUMemorySender":
        return GPUMemorySender(index, reader_timeout_s, self._sharing, asked=asked)

    def receiver(self, broadcast: Callable[..., Any]) -> "GPUMemoryReceiver":
        del broadcast  # every rank copies by itself
        return GPUMemoryReceiver(self._sharing)


class GPUMemorySender(SharedMemorySender):
    """Casts this rank's shards into their places in memory of GPUs."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float, sharing: MemorySharing, *, asked: bool) -> None:
        super().__init__(index, reader_timeout_s)
        self._sharing = sharing
        self._asked = asked

    def _make_buffers(self, manifest: Manifest) -> list[GPUBuffer]:
        """Every rank allocates its part of each buffer, then all open those of the others."""
        begin, num_bytes = cut(manifest, len(all_gather(None)))[self._rank]
        own: list[tuple[torch.Tensor, GPUPart]] = []
        buffers: list[GPUBuffer] = []
        problem: WeightsError | None = None
        try:
            self._check(LIVING_VERSIONS * num_bytes)
            if num_bytes:
                for _ in range(LIVING_VERSIONS):
                    own.append(self._sharing.allocate(begin, num_bytes))
            if self._rank == 0:
                buffers += [GPUBuffer.create_header(manifest) for _ in range(LIVING_VERSIONS)]
        except WeightsError as error:
            problem = error
        self._agree(problem, own, buffers)
        of_ranks = all_gather(([part for _, part in own], [buffer.location for buffer in buffers]))
        try:
            if self._rank > 0:
                buffers = [GPUBuffer.open(location, writable=True) for location in of_ranks[0][1]]
            for version, buffer in enumerate(buffers):
                parts = [parts[version] for parts, _ in of_ranks if parts]
                buffer.hold(parts, self._sharing, {part.handle: memory for memory, part in own})
        except WeightsError as error:
            problem = error
        self._agree(problem, own, buffers)
        return buffers

    def _agree(
        self, problem: WeightsError | None, own: list[tuple[torch.Tensor, GPUPart]], buffers: list[GPUBuffer]
    ) -> None:
        """Frees everything and raises on all ranks if one has a problem."""
        try:
            raise_on_every_rank(problem, CANNOT_PUBLISH)
        except BaseException:
            for buffer in buffers:
                buffer.close()
            all_gather(None)  # memory may be freed once no rank has it open
            for memory, _ in own:
                self._sharing.close(memory, owned=True)
            raise

    def _check(self, num_bytes: int) -> None:
        why_not = self._sharing.why_not()
        if not why_not and not self._asked:
            why_not = self._sharing.why_not_by_default(num_bytes)
        if why_not:
            raise WeightsError(f"weight_transport='gpu_memory' is not possible: {why_not}; use 'shared_memory'")

    def _copy(self, pairs: Sequence[gpu_copies.Pair]) -> None:
        gpu_copies.copy(pairs)
        self._sharing.wait()


class GPUMemoryReceiver(SharedMemoryReceiver):
    """Opens the trainer's memory, and keeps it open."""

    def __init__(self, sharing: MemorySharing) -> None:
        super().__init__()
        self._sharing = sharing

    def _map(self, location: BufferLocation) -> GPUBuffer:
        return GPUBuffer.open_parts(location, self._sharing)
