"""The shared memory that carries published weights on one host, and the header that says which version it holds.

A buffer is an anonymous file (memfd) of the process that made it. Other processes of the host open it through
/proc/<pid>/fd/<fd>; the kernel frees it when the last of them is gone, so nothing is left behind however they end. A
writer holds an exclusive `flock` from before the first byte until the header is sealed, a reader a shared one while
it reads; the kernel drops the locks of a dead process. A reader that holds the lock and finds exactly the header that
its record names therefore reads one whole version. The tensors' checksums follow the header, so that a version's record
holds nothing that is only known when the last byte is written.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import time
import warnings
from collections.abc import Generator

import torch

from rl.weights.checksums import BufferChecksums
from rl.weights.host import available_memory_bytes
from rl.weights.manifest import (
    HEADER_BYTES,
    LIVING_VERSIONS,
    Manifest,
    TensorSpec,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    buffer_size,
    corrupted,
)

_HEADER = struct.Struct("=8sqqq32s")  # magic, push_index or _UNSEALED, version, size in bytes, manifest checksum
_MAGIC = b"ownloop2"
_UNSEALED = -1
_POLL_S = 0.002


def _short_of_memory(size_bytes: int, reason: str = "") -> WeightsError:
    return WeightsError(
        f"weights need {size_bytes / 1e6:.1f} MB of shared memory and {available_memory_bytes() / 1e6:.1f} MB are"
        f" available{reason}; weight_transport='torchstore' needs none"
    )


class WeightBuffer:
    """One version's worth of shared memory, mapped into this process.

    Made once and rewritten many times, because fresh pages cost several times what copying into them costs. One thread
    at a time may use an instance.
    """

    def __init__(self, fd: int, location: tuple[int, int, int], *, writable: bool) -> None:
        """Use `create` or `open`."""
        self.location = location
        self._fd = fd
        self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        with warnings.catch_warnings():
            # A read-only mapping is meant: a loader that writes into published weights must not go unnoticed.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._tensors: dict[TensorSpec, torch.Tensor] = {}
        self._layout = b""  # of the manifest that the next line is for
        self._checksums: dict[bool, BufferChecksums] = {}

    @classmethod
    def create(cls, size_bytes: int) -> "WeightBuffer":
        """Allocates a buffer that this process owns. Raises `WeightsError` if the host's memory does not suffice."""
        fd = os.memfd_create("ownloop-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            raise _short_of_memory(size_bytes, f" ({error.strerror})") from error
        buffer = cls(fd, (os.getpid(), fd, os.fstat(fd).st_ino), writable=True)
        buffer._write_header(_UNSEALED, 0, b"")
        return buffer

    @classmethod
    def create_for(cls, manifest: Manifest) -> "list[WeightBuffer]":
        """Allocates a buffer for each of the versions that live. Raises `WeightsError` if there is no room for all."""
        size_bytes = LIVING_VERSIONS * buffer_size(manifest)
        if size_bytes > available_memory_bytes():
            raise _short_of_memory(size_bytes)
        buffers: list[WeightBuffer] = []
        try:
            for _ in range(LIVING_VERSIONS):
                buffers.append(cls.create(buffer_size(manifest)))
        except WeightsError:
            for buffer in buffers:
                buffer.close()
            raise
        return buffers

    @classmethod
    def open(cls, location: tuple[int, int, int], *, writable: bool = False) -> "WeightBuffer":
        """Maps a buffer that another process of this host made. Raises `WeightsError` if that process is gone."""
        return cls(_open(location, os.O_RDWR if writable else os.O_RDONLY), location, writable=writable)

    @property
    def data(self) -> torch.Tensor:
        """All of its bytes, header included (uint8 [N]). Valid as a view of one tensor is."""
        return self._bytes

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A view of one tensor. Valid while the buffer is locked; it must not outlive the buffer."""
        view = self._tensors.get(spec)
        if view is None:
            view = self._bytes[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            self._tensors[spec] = view
        return view

    def checksums(self, record: VersionRecord) -> tuple[int, ...]:
        """`BufferChecksums` of what lies in the buffer, if that is laid out as in `record`."""
        if record.layout != self._layout:
            self._layout = record.layout
            self._checksums.clear()
        checksums = self._checksums.get(record.full_checksums)
        if checksums is None:
            extents = [(spec.offset, spec.nbytes) for spec in record.manifest]
            checksums = self._checksums[record.full_checksums] = BufferChecksums(extents, full=record.full_checksums)
        return checksums(self._bytes)

    def check_checksums(self, record: VersionRecord) -> None:
        """Raises `WeightsError` naming the first tensor that is not what was published."""
        published = struct.unpack_from(f"={len(record.manifest)}q", self._memory, HEADER_BYTES)
        for spec, expected, found in zip(record.manifest, published, self.checksums(record), strict=True):
            if found != expected:
                raise corrupted(record, spec, f"its checksum is {found} instead of {expected}")

    def holds_same_as(self, other: "WeightBuffer", manifest: Manifest) -> bool:
        """Whether the tensors of two buffers that are laid out alike are the same."""
        begin = manifest[0].offset
        return torch.equal(self._bytes[begin:], other._bytes[begin:])

    def begin_write(self, timeout_s: float) -> None:
        """Waits for readers of the previous content, then withdraws it. Raises `WeightsError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._try_lock(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise WeightsError(f"a reader has kept the weight buffer locked for {timeout_s:g} s; is it stopped?")
            time.sleep(_POLL_S)
        self._write_header(_UNSEALED, 0, b"")

    def seal(self, record: VersionRecord, checksums: tuple[int, ...]) -> None:
        """Declares the content to be that of `record`, with these checksums, and admits readers."""
        struct.pack_into(f"={len(record.manifest)}q", self._memory, HEADER_BYTES, *checksums)
        self._write_header(record.push_index, record.version, record.layout)
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def abandon_write(self) -> None:
        """Ends a write that failed. The buffer holds no version until it is written again."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def reading(self, record: VersionRecord) -> Generator[None]:
        """While inside, the buffer holds exactly what `record` describes.

        Raises `UnknownVersionError` if it holds, or is being given, another version by now.
        """
        if not self._try_lock(fcntl.LOCK_SH):
            raise UnknownVersionError(f"version {record.version} cannot be pulled: it or a newer one is being written")
        try:
            expected = (_MAGIC, record.push_index, record.version, len(self._memory), record.layout)
            found = _HEADER.unpack_from(self._memory)
            if found != expected:
                state = "an unfinished push" if found[1] == _UNSEALED else f"version {found[2]}"
                raise UnknownVersionError(
                    f"version {record.version} is no longer kept: its buffer holds {state} by now"
                )
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Gives the descriptor back. The memory follows when its last tensor view is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _try_lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _write_header(self, push_index: int, version: int, checksum: bytes) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, push_index, version, len(self._memory), checksum)


def held_version(location: tuple[int, int, int]) -> tuple[int, int] | None:
    """Publication and version that a buffer holds; None if it holds none, or is being given one.

    Raises `WeightsError` if the process that made the buffer is gone.
    """
    fd = _open(location, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _, push_index, version, _, _ = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
    except BlockingIOError:
        return None
    finally:
        os.close(fd)
    return None if push_index == _UNSEALED else (push_index, version)


def _open(location: tuple[int, int, int], flags: int) -> int:
    pid, owner_fd, inode = location
    gone = f"the weights were published by process {pid}, which is gone; they have to be pushed again"
    try:
        fd = os.open(f"/proc/{pid}/fd/{owner_fd}", flags | os.O_CLOEXEC)
    except FileNotFoundError:
        raise WeightsError(gone) from None
    if os.fstat(fd).st_ino != inode:  # the number was given to another process, or another file
        os.close(fd)
        raise WeightsError(gone)
    return fd
