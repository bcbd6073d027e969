"""One version of the weights in the memory of the trainer's GPUs.

Header, checksums and locks are those of a `WeightBuffer`, which holds no tensors here: they lie in parts, one on each
trainer rank's GPU. So what holds for readers, writers and dead processes there holds here too.
"""

import bisect
import contextlib
import itertools
from collections.abc import Generator, Sequence

import torch

from rl.weights.buffer import BufferLocation, WeightBuffer
from rl.weights.checksums import BufferChecksums
from rl.weights.gpu_sharing import GPUPart, MemorySharing
from rl.weights.manifest import HEADER_BYTES, Manifest, TensorSpec, VersionRecord, buffer_size


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
