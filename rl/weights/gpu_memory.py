"""The transport between GPUs of one host: trainer ranks cast into memory of their GPUs, and generators copy from there.

No byte passes through the host. Header, checksums and locks of a version are those of a `WeightBuffer`, so what holds
for readers, writers and dead processes there holds here too. Each trainer rank has a part of the buffer on its own GPU,
whole tensors, and writes its shards of other tensors into the parts of others. A generator's ranks copy the slices they
need from all of them.
"""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from rl.weights import copies as gpu_copies
from rl.weights.buffer import BufferLocation, WeightBuffer
from rl.weights.gpu_sharing import CUDASharing, GPUPart, MemorySharing
from rl.weights.ranks import CANNOT_PUBLISH, all_gather, num_ranks, raise_on_every_rank
from rl.weights.shared_memory import SharedMemory, SharedMemoryReceiver, SharedMemorySender
from rl.weights.versions import (
    HEADER_BYTES,
    LIVING_VERSIONS,
    BufferChecksums,
    Manifest,
    TensorSpec,
    VersionIndex,
    VersionRecord,
    WeightsError,
    buffer_size,
)


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

    def _make_buffers(self, manifest: Manifest) -> list["GPUBuffer"]:
        """Every rank allocates its part of each buffer, then all open those of the others."""
        begin, num_bytes = cut(manifest, num_ranks())[self._rank]
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
        self, problem: WeightsError | None, own: list[tuple[torch.Tensor, GPUPart]], buffers: list["GPUBuffer"]
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

    def _map(self, location: BufferLocation) -> "GPUBuffer":
        return GPUBuffer.open_parts(location, self._sharing)


def cut(manifest: Manifest, num_parts: int) -> list[tuple[int, int]]:
    """First byte and number of bytes of each part: whole tensors, as even as they allow. Parts may be empty."""
    first = manifest[0].offset if manifest else HEADER_BYTES
    end = buffer_size(manifest)
    ends = [spec.offset for spec in manifest[1:]] + [end]
    cuts = [first]
    for part in range(1, num_parts):
        wanted = first + (end - first) * part // num_parts
        cuts.append(max(cuts[-1], min(ends, key=lambda offset: abs(offset - wanted))))
    cuts.append(end)
    return [(begin, after - begin) for begin, after in itertools.pairwise(cuts)]


class GPUBuffer(WeightBuffer):
    """A buffer whose tensors lie in parts of GPU memory."""

    _sharing: MemorySharing
    _parts: tuple[torch.Tensor, ...] = ()
    _begins: tuple[int, ...] = ()
    _opened: tuple[torch.Tensor, ...] = ()

    @classmethod
    def create_header(cls, manifest: Manifest) -> "GPUBuffer":
        """Allocates the header and room for the checksums."""
        return cls.create(manifest[0].offset if manifest else HEADER_BYTES)

    def hold(self, parts: Sequence[GPUPart], sharing: MemorySharing, own: dict[bytes, torch.Tensor]) -> None:
        """Has the tensors lie in `parts`: those that this process allocated, by their handles, and others.

        Raises `WeightsError` if one cannot be opened.
        """
        self._sharing = sharing
        memories: list[torch.Tensor] = []
        for part in parts:
            memory = own.get(part.handle)
            if memory is None:
                memory = sharing.open(part)
                self._opened += (memory,)
            memories.append(memory)
        self._parts = tuple(memories)
        self._begins = tuple(part.begin for part in parts)
        self.location = self.location._replace(gpu_parts=tuple(parts))

    @classmethod
    def open_parts(cls, location: BufferLocation, sharing: MemorySharing) -> "GPUBuffer":
        """Opens a buffer of another process. Raises `WeightsError` if it is gone, or out of this GPU's reach."""
        buffer = cls.open(location)
        try:
            buffer.hold(location.gpu_parts, sharing, {})
        except BaseException:
            buffer.close()
            raise
        return buffer

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self._parts

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        view = self._tensors.get(spec)
        if view is None:
            index = self._part_of(spec)
            begin = spec.offset - self._begins[index]
            view = self._parts[index][begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)
            self._tensors[spec] = view
        return view

    def checksums(self, record: VersionRecord) -> tuple[int, ...]:
        if record.layout != self._layout:
            self._layout = record.layout
            self._by_part: dict[bool, list[BufferChecksums]] = {}
        checksums = self._by_part.get(record.full_checksums)
        if checksums is None:
            extents: list[list[tuple[int, int]]] = [[] for _ in self._parts]
            for spec in record.manifest:
                index = self._part_of(spec)
                extents[index].append((spec.offset - self._begins[index], spec.nbytes))
            checksums = [BufferChecksums(each, full=record.full_checksums) for each in extents]
            self._by_part[record.full_checksums] = checksums
        # Parts follow each other as the manifest's tensors do.
        return tuple(value for sums, part in zip(checksums, self._parts, strict=True) for value in sums(part))

    def holds_same_as(self, other: WeightBuffer, manifest: Manifest) -> bool:
        del manifest
        return all(torch.equal(a, b) for a, b in zip(self.parts, other.parts, strict=True))

    @contextlib.contextmanager
    def reading(self, record: VersionRecord) -> Generator[None]:
        """Also waits for the copies that were queued, before it lets a writer in."""
        with super().reading(record):
            try:
                yield
            finally:
                self._sharing.wait()

    def close(self) -> None:
        """Closes what this process opened. Memory that it allocated lives as long as the process.

        CUDA forbids freeing memory that others have open, and a generator keeps it open from pull to pull.
        """
        for memory in self._opened:
            self._sharing.close(memory, owned=False)
        self._opened = ()
        super().close()

    def _part_of(self, spec: TensorSpec) -> int:
        return bisect.bisect_right(self._begins, spec.offset) - 1
