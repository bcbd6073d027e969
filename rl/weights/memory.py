"""Shared memory that carries one version of the weights on one host, and its header, which names that version.

A buffer is an anonymous file (memfd) of the process that created it. Other processes of the host open it through
/proc/<pid>/fd/<fd>. The kernel frees it when the last of these processes ends, in any way, so nothing is left
behind.

A writer holds an exclusive `flock` from before its first byte until it has sealed the header; a reader holds a shared
one while it reads; the kernel drops the locks of a dead process. So a reader that holds the lock, and finds exactly the
header that its record describes, reads one whole version.

The tensors' checksums follow the header. They are not in the version's record, because they are only known when the
last byte is written and the record is needed before. They are sums of the tensors' bits, which cost little compared
with copying the tensors. They catch tensors that were written wrongly, not written, or overwritten. They do not protect
against an attacker, and do not notice values that only changed places.
"""

import bisect
import contextlib
import fcntl
import mmap
import os
import struct
import time
import warnings
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import torch

from rl.system.cuda import pin, unpin
from rl.system.hardware import available_memory_bytes
from rl.weights.version import (
    HEADER_BYTES,
    LINE_BYTES,
    LIVING_VERSIONS,
    Manifest,
    PublisherGoneError,
    TensorSpec,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    buffer_size,
    corrupted,
)

# Magic, push_index or _UNSEALED, version, size in bytes, manifest checksum, frozen_id.
_HEADER = struct.Struct("=8sqqq32s16s")
_MAGIC = b"ownloop3"
_UNSEALED = -1
_POLL_S = 0.002


class GPUPart(NamedTuple):
    """A part of a weight buffer, in the memory of one GPU."""

    begin: int
    """The offset in the manifest's layout at which it begins."""
    num_bytes: int
    gpu: str
    """The GPU's UUID, for errors."""
    handle: bytes
    """With which other processes open the memory."""
    pid: int
    """The process whose memory it is. CUDA frees it with that process, also while others have it open."""


class BufferLocation(NamedTuple):
    """How the processes of one host find a buffer."""

    pid: int
    """The process that created it."""
    fd: int
    """That process's file descriptor."""
    inode: int
    """Distinguishes the buffer from a later file with the same numbers."""
    gpu_parts: tuple[GPUPart, ...] = ()
    """Where the tensors lie if they are in memory of GPUs; see `rl.weights.gpu.GPUBuffer`."""


def short_of_memory(size_bytes: int, reason: str = "") -> WeightsError:
    """The error for buffers that do not fit."""
    return WeightsError(
        f"weights need {size_bytes / 1e6:.1f} MB of shared memory and {available_memory_bytes() / 1e6:.1f} MB are"
        f" available{reason}; weight_transport='torchstore' needs none"
    )


class WeightBuffer:
    """Shared memory for one version, mapped into this process. Not safe to use from several threads at a time.

    A buffer is created once and rewritten many times, because allocating pages takes several times as long as copying
    into them.
    """

    def __init__(self, fd: int, location: BufferLocation, *, writable: bool) -> None:
        """Use `create` or `open`."""
        self.location = location
        self._fd = fd
        self._writable = writable
        self._pinned = False
        self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        with warnings.catch_warnings():
            # Readers map the memory read-only on purpose, so that writing into published weights fails.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.parts: tuple[torch.Tensor, ...] = (self._bytes,)
        """The memory that holds the tensors: all bytes, header included, unless they lie in parts of GPU memory."""
        self.begins: tuple[int, ...] = (0,)  # the offset in the manifest at which each part begins
        self.sealed: tuple[int, ...] = ()
        """The checksums of the version that this process sealed last."""
        self._checksums: list[BufferChecksums] = []  # of each part, once they are needed

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """Allocates a buffer that this process owns. Raises `WeightsError` if the host has too little memory."""
        fd = os.memfd_create("ownloop-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            raise short_of_memory(size_bytes, f" ({error.strerror})") from error
        buffer = cls(fd, BufferLocation(os.getpid(), fd, os.fstat(fd).st_ino), writable=True)
        buffer._write_header(_UNSEALED)
        return buffer

    @classmethod
    def create_for(cls, manifest: Manifest) -> list[Self]:
        """Allocates `LIVING_VERSIONS` buffers. Raises `WeightsError` if they do not all fit."""
        size_bytes = LIVING_VERSIONS * buffer_size(manifest)
        if size_bytes > available_memory_bytes():
            raise short_of_memory(size_bytes)
        buffers: list[Self] = []
        try:
            for _ in range(LIVING_VERSIONS):
                buffers.append(cls.create(buffer_size(manifest)))
        except WeightsError:
            for buffer in buffers:
                buffer.close()
            raise
        return buffers

    @classmethod
    def open(cls, location: BufferLocation, *, writable: bool = False) -> Self:
        """Maps a buffer that another process of this host created. Raises `WeightsError` if that process is gone."""
        return cls(_open(location, os.O_RDWR if writable else os.O_RDONLY), location, writable=writable)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A view of one tensor. Valid while the buffer is locked; it must not outlive the buffer, nor must `parts`."""
        part = self._part_of(spec)
        begin = spec.offset - self.begins[part]
        return self.parts[part][begin : begin + spec.nbytes].view(spec.dtype).view(spec.shape)

    def checksums(self, record: VersionRecord) -> tuple[int, ...]:
        """`BufferChecksums` of the buffer's content. All records of a buffer have the same layout."""
        if not self._checksums:
            extents: list[list[tuple[int, int]]] = [[] for _ in self.parts]
            for spec in record.manifest:
                part = self._part_of(spec)
                extents[part].append((spec.offset - self.begins[part], spec.nbytes))
            self._checksums = [BufferChecksums(each) for each in extents]
        # Parts follow each other as the manifest's tensors do.
        return tuple(value for sums, part in zip(self._checksums, self.parts, strict=True) for value in sums(part))

    def check_checksums(self, record: VersionRecord) -> None:
        """Raises `WeightsError` naming the first tensor that differs from what was published."""
        published = struct.unpack_from(f"={len(record.manifest)}q", self._memory, HEADER_BYTES)
        for spec, expected, found in zip(record.manifest, published, self.checksums(record), strict=True):
            if found != expected:
                raise corrupted(record, spec, f"its checksum is {found} instead of {expected}")

    def begin_write(self, timeout_s: float) -> None:
        """Waits for readers of the previous content, then withdraws it. Raises `WeightsError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._try_lock(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise WeightsError(f"a reader has kept the weight buffer locked for {timeout_s:g} s; is it stopped?")
            time.sleep(_POLL_S)
        self._write_header(_UNSEALED)

    def seal(self, record: VersionRecord) -> None:
        """Declares the content to be that of `record`, and admits readers."""
        self.sealed = self.checksums(record)
        # The header goes last: a writer that dies before leaves a buffer without a version.
        struct.pack_into(f"={len(record.manifest)}q", self._memory, HEADER_BYTES, *self.sealed)
        self._write_header(record.push_index, record.version, record.manifest.layout, record.frozen_id)
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def abandon_write(self) -> None:
        """Ends a write that failed. The buffer holds no version until the next write."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def is_unchanged(self, record: VersionRecord, before: "WeightBuffer | None") -> bool:
        """Whether `record`, which was just sealed, equals the version that was sealed `before`, if that is kept."""
        if before is None or before is self or before.sealed != self.sealed:
            return False
        # Equal checksums of samples prove nothing, so every byte behind the header is compared.
        begins = [max(record.manifest[0].offset - begin, 0) for begin in self.begins]
        parts = zip(begins, self.parts, before.parts, strict=True)
        return all(torch.equal(new[begin:], old[begin:]) for begin, new, old in parts)

    @contextlib.contextmanager
    def reading(self, record: VersionRecord) -> Generator[None]:
        """Locks the buffer, which holds exactly the version of `record` while inside.

        Raises `UnknownVersionError` if the buffer holds another version by now, or is being written.
        """
        if not self._try_lock(fcntl.LOCK_SH):
            raise UnknownVersionError(f"version {record.version} cannot be pulled: it or a newer one is being written")
        try:
            sealed = record.push_index, record.version, len(self._memory), record.manifest.layout, record.frozen_id
            found = _HEADER.unpack_from(self._memory)
            if found != (_MAGIC, *sealed):
                state = "an unfinished push" if found[1] == _UNSEALED else f"version {found[2]}"
                raise UnknownVersionError(
                    f"version {record.version} is no longer kept: its buffer holds {state} by now"
                )
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def pin(self) -> None:
        """Pins the memory in a process that uses a GPU, for copies at the speed of its link. Says so if it cannot."""
        if not torch.cuda.is_initialized():
            return
        why = pin(self._bytes, writable=self._writable)
        self._pinned = not why
        if why:
            print(f"weights travel more slowly than they could: {why}", flush=True)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed with its last tensor view."""
        if self._pinned:
            self._pinned = False
            unpin(self._bytes)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _part_of(self, spec: TensorSpec) -> int:
        return bisect.bisect_right(self.begins, spec.offset) - 1

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write_header(self, push_index: int, version: int = 0, layout: bytes = b"", frozen_id: bytes = b"") -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, push_index, version, len(self._memory), layout, frozen_id)


def held_version(record: VersionRecord, location: BufferLocation) -> VersionRecord | None:
    """The version that a buffer of `record`'s policy holds now; None while it holds no whole one.

    Raises `WeightsError` if the process that created the buffer is gone.
    """
    fd = _open(location, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _, push_index, version, _, _, frozen_id = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
    held = replace(record, push_index=push_index, version=version, frozen_id=frozen_id)
    return None if push_index == _UNSEALED else held


def is_kept(location: BufferLocation) -> bool:
    """Whether the process that created a buffer has not closed it, and all processes with a part of it are alive."""
    try:
        alive = all(Path(f"/proc/{part.pid}/exe").exists() for part in location.gpu_parts)
        return alive and Path(f"/proc/{location.pid}/fd/{location.fd}").stat().st_ino == location.inode
    except OSError:
        return False


def _open(location: BufferLocation, flags: int) -> int:
    pid, owner_fd, inode = location[:3]
    gone = f"the weights were published by process {pid}, which is gone; they have to be pushed again"
    try:
        fd = os.open(f"/proc/{pid}/fd/{owner_fd}", flags | os.O_CLOEXEC)
    except FileNotFoundError:
        raise PublisherGoneError(gone) from None
    except PermissionError:  # as of any process that has ended and that nobody has waited for yet
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            raise
        raise PublisherGoneError(gone) from None
    if os.fstat(fd).st_ino != inode:  # the pid or descriptor was reused
        os.close(fd)
        raise PublisherGoneError(gone)
    return fd


_MODULUS = 1 << 64
_SAMPLED_LINES = 64
_SPREAD = 40503  # 2^16 / golden ratio: samples differ in their column for any width of a row


class BufferChecksums:
    """Checksums of the tensors of a buffer: sums of their 64-bit words, modulo 2^64.

    Of a tensor above 4 KiB they cover 64 lines of 64 bytes, spread over all of it so that every rank's shard is
    sampled. A single wrong word elsewhere goes unnoticed.
    """

    def __init__(self, extents: Sequence[tuple[int, int]]) -> None:
        """`extents` holds every tensor's first byte and its number of bytes."""
        sampled = [offset // LINE_BYTES + _sample(-(-size // LINE_BYTES)) for offset, size in extents]
        self._sampled = torch.cat([torch.zeros(0, dtype=torch.int64), *sampled])
        self._owners = torch.repeat_interleave(torch.tensor([len(lines) for lines in sampled], dtype=torch.int64))
        self._num_tensors = len(sampled)

    def __call__(self, data: torch.Tensor) -> tuple[int, ...]:
        """The checksum of every tensor, from a buffer's bytes (uint8 [N], N a multiple of 64)."""
        lines = data.view(torch.int64).view(-1, LINE_BYTES // 8)
        if self._sampled.device != data.device:
            self._sampled, self._owners = self._sampled.to(data.device), self._owners.to(data.device)
        sums = torch.zeros(self._num_tensors, dtype=torch.int64, device=data.device)
        return tuple(sums.index_add_(0, self._owners, lines.index_select(0, self._sampled).sum(1)).tolist())


def element_sum(tensor: torch.Tensor) -> int:
    """The sum of the bit patterns of a tensor's elements. Ranks that hold its shards can `add_up` theirs."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64)) % _MODULUS


def add_up(sums: Iterable[int]) -> int:
    """The `element_sum` of a tensor, from the sums of its shards."""
    return sum(sums) % _MODULUS


def _sample(num_lines: int) -> torch.Tensor:
    """The lines of a tensor that sampled checksums cover."""
    if num_lines <= _SAMPLED_LINES:
        return torch.arange(num_lines)
    positions = torch.arange(_SAMPLED_LINES)
    begins = positions * num_lines // _SAMPLED_LINES
    widths = (positions + 1) * num_lines // _SAMPLED_LINES - begins
    return begins + positions * _SPREAD % widths
