"""What a published set of weights is: its manifest, its record, and the shared-memory slot that carries it on one host.

A slot is an anonymous file (memfd) of the process that made it. Other processes of the host open it through
/proc/<pid>/fd/<fd>; the kernel frees it when the last of them is gone, so nothing is left behind however they end. A
writer holds an exclusive `flock` from before the first byte until the header is sealed, a reader a shared one while
it reads; the kernel drops the locks of a dead process. A reader that holds the lock and finds exactly the header that
its record names therefore reads one whole version. The tensors' digests follow the header, so that a version's record
holds nothing that is only known when the last byte is written.

This module knows tensors and files. Who publishes is in `trainer/weights.py`, who loads in `generator/weights.py`.
"""

import contextlib
import fcntl
import hashlib
import math
import mmap
import os
import pickle
import struct
import time
import warnings
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from rl.digests import LINE_BYTES, SlotDigests
from rl.hosts import available_memory_bytes

Transport = Literal["shared_memory", "torchstore"]
"""How the bytes travel: in place on one host, or through TorchStore between any hosts."""

INDEX_KEY = "ownloop/weights"
"""Key in TorchStore of the tuple of `VersionRecord`s that can be pulled, oldest first."""

LIVING_VERSIONS = 2
"""How many published versions stay whole: the newest can be written while the one before is read."""

_HEADER = struct.Struct("=8sqqq32s")  # magic, publication or _UNSEALED, version, size in bytes, manifest digest
_HEADER_BYTES = 4096
_DIGEST_BYTES = 8
_MAGIC = b"ownloop2"
_UNSEALED = -1
_POLL_S = 0.002


class WeightsError(RuntimeError):
    """Weights could not be published or taken in, through no mistake of the caller."""


class UnknownVersionError(ValueError):
    """A version was asked for that was never published or is no longer kept."""


class WeightsMismatchError(ValueError):
    """Published tensors are not those of the model that should take them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a slot."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """The full tensor's shape, whatever its sharding."""
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the slot."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Manifest = tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """All that a reader needs to take in one published version. Travels through TorchStore."""

    version: int
    """Policy version."""
    publication: int
    """Counts publications of one publisher; tells apart two that carry the same version."""
    manifest: Manifest
    dtype: torch.dtype
    """Of every floating-point tensor in the manifest."""
    transport: Transport
    host: str
    """`host_identity()` of the publisher."""
    slot: tuple[int, int, int] | None
    """Process id, file descriptor and inode of the slot; None where the tensors are in TorchStore."""
    layout: bytes
    """`manifest_digest` of the manifest."""
    full_digests: bool
    """Whether the digests look at every byte or at samples."""
    digests: tuple[int, ...] = ()
    """`element_sum` of every tensor in the manifest's order, where they are in TorchStore; a slot carries its own."""

    def key(self, name: str) -> str:
        """The key in TorchStore of one of its tensors."""
        return f"{INDEX_KEY}/{self.version}/{self.publication}/{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the manifest, which versions share, as bytes that a process decodes once: it takes milliseconds."""
        others = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "manifest"}
        return _record, (_encoded(self.manifest), others)


def _record(manifest: bytes, others: dict[str, Any]) -> VersionRecord:
    return VersionRecord(manifest=_decoded(manifest), **others)


@lru_cache(maxsize=4)
def _encoded(manifest: Manifest) -> bytes:
    return pickle.dumps(manifest)


@lru_cache(maxsize=4)
def _decoded(manifest: bytes) -> Manifest:
    return pickle.loads(manifest)


class Store(Protocol):
    """What is needed of TorchStore; its `LocalClient` has it."""

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor, a DTensor's shard or any object that can be pickled."""
        ...

    async def get(self, key: str) -> Any:
        """Fetches what was put, a DTensor as the full tensor. Raises KeyError if nothing was."""
        ...

    async def delete(self, key: str) -> None:
        """Forgets a key."""
        ...


def build_manifest(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> Manifest:
    """Lays tensors out behind header and digests, aligned to lines of digests. ValueError for a name given twice."""
    tensors = list(tensors)
    specs: dict[str, TensorSpec] = {}
    offset = _HEADER_BYTES + _whole_lines(len(tensors) * _DIGEST_BYTES)
    for name, shape, dtype in tensors:
        if name in specs:
            raise ValueError(f"the tensor {name!r} occurs twice among the weights; each name may occur once")
        specs[name] = TensorSpec(name, tuple(shape), dtype, offset)
        offset += _whole_lines(specs[name].nbytes)
    return tuple(specs.values())


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def slot_size(manifest: Manifest) -> int:
    """Bytes that a slot for these tensors takes."""
    return max((spec.offset + _whole_lines(spec.nbytes) for spec in manifest), default=_HEADER_BYTES)


def manifest_digest(manifest: Manifest) -> bytes:
    """SHA-256 over names, shapes, dtypes and offsets."""
    return hashlib.sha256(repr(manifest).encode()).digest()


def corrupted(record: VersionRecord, spec: TensorSpec, what: str) -> WeightsError:
    """The error of a tensor that is not what was published."""
    return WeightsError(
        f"version {record.version} is corrupted: {spec.name!r} is not what was published ({what}); it has to be pushed"
        " again"
    )


def find_version(records: Iterable[VersionRecord], version: int) -> VersionRecord:
    """Picks a version's record; the newest where it was published twice.

    Raises `UnknownVersionError` naming the versions that can be pulled.
    """
    by_version = {record.version: record for record in records}
    if version not in by_version:
        living = ", ".join(map(str, sorted(by_version))) or "none; nothing was pushed yet"
        raise UnknownVersionError(f"version {version} cannot be pulled; versions that can: {living}")
    return by_version[version]


def _short_of_memory(size_bytes: int, reason: str = "") -> WeightsError:
    return WeightsError(
        f"weights need {size_bytes / 1e6:.1f} MB of shared memory and {available_memory_bytes() / 1e6:.1f} MB are"
        f" available{reason}; weight_transport='torchstore' needs none"
    )


class WeightSlot:
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
        self._digests: dict[bool, SlotDigests] = {}

    @classmethod
    def create(cls, size_bytes: int) -> "WeightSlot":
        """Allocates a slot that this process owns. Raises `WeightsError` if the host's memory does not suffice."""
        fd = os.memfd_create("ownloop-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            os.close(fd)
            raise _short_of_memory(size_bytes, f" ({error.strerror})") from error
        slot = cls(fd, (os.getpid(), fd, os.fstat(fd).st_ino), writable=True)
        slot._write_header(_UNSEALED, 0, b"")
        return slot

    @classmethod
    def create_for(cls, manifest: Manifest) -> "list[WeightSlot]":
        """Allocates a slot for each of the versions that live. Raises `WeightsError` if there is no room for all."""
        size_bytes = LIVING_VERSIONS * slot_size(manifest)
        if size_bytes > available_memory_bytes():
            raise _short_of_memory(size_bytes)
        slots: list[WeightSlot] = []
        try:
            for _ in range(LIVING_VERSIONS):
                slots.append(cls.create(slot_size(manifest)))
        except WeightsError:
            for slot in slots:
                slot.close()
            raise
        return slots

    @classmethod
    def open(cls, location: tuple[int, int, int], *, writable: bool = False) -> "WeightSlot":
        """Maps a slot that another process of this host made. Raises `WeightsError` if that process is gone."""
        pid, owner_fd, inode = location
        gone = f"the weights were published by process {pid}, which is gone; they have to be pushed again"
        try:
            fd = os.open(f"/proc/{pid}/fd/{owner_fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise WeightsError(gone) from None
        if os.fstat(fd).st_ino != inode:  # the number was given to another process, or another file
            os.close(fd)
            raise WeightsError(gone)
        return cls(fd, location, writable=writable)

    @property
    def data(self) -> torch.Tensor:
        """All of its bytes, header included (uint8 [N]). Valid as a view of one tensor is."""
        return self._bytes

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A view of one tensor. Valid while the slot is locked; it must not outlive the slot."""
        view = self._tensors.get(spec)
        if view is None:
            view = self._bytes[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape)
            self._tensors[spec] = view
        return view

    def digests(self, record: VersionRecord) -> tuple[int, ...]:
        """`SlotDigests` of what lies in the slot, if that is laid out as in `record`."""
        if record.layout != self._layout:
            self._layout = record.layout
            self._digests.clear()
        digests = self._digests.get(record.full_digests)
        if digests is None:
            extents = [(spec.offset, spec.nbytes) for spec in record.manifest]
            digests = self._digests[record.full_digests] = SlotDigests(extents, full=record.full_digests)
        return digests(self._bytes)

    def check_digests(self, record: VersionRecord) -> None:
        """Raises `WeightsError` naming the first tensor that is not what was published."""
        published = struct.unpack_from(f"={len(record.manifest)}q", self._memory, _HEADER_BYTES)
        for spec, expected, found in zip(record.manifest, published, self.digests(record), strict=True):
            if found != expected:
                raise corrupted(record, spec, f"its digest is {found} instead of {expected}")

    def holds_same_as(self, other: "WeightSlot", manifest: Manifest) -> bool:
        """Whether the tensors of two slots that are laid out alike are the same."""
        begin = manifest[0].offset
        return torch.equal(self._bytes[begin:], other._bytes[begin:])

    def begin_write(self, timeout_s: float) -> None:
        """Waits for readers of the previous content, then withdraws it. Raises `WeightsError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._try_lock(fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise WeightsError(f"a reader has kept the weight slot locked for {timeout_s:g} s; is it stopped?")
            time.sleep(_POLL_S)
        self._write_header(_UNSEALED, 0, b"")

    def seal(self, record: VersionRecord, digests: tuple[int, ...]) -> None:
        """Declares the content to be that of `record`, with these digests, and admits readers."""
        struct.pack_into(f"={len(record.manifest)}q", self._memory, _HEADER_BYTES, *digests)
        self._write_header(record.publication, record.version, record.layout)
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def abandon_write(self) -> None:
        """Ends a write that failed. The slot holds no version until it is written again."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def reading(self, record: VersionRecord) -> Generator[None]:
        """While inside, the slot holds exactly what `record` describes.

        Raises `UnknownVersionError` if it holds, or is being given, another version by now.
        """
        if not self._try_lock(fcntl.LOCK_SH):
            raise UnknownVersionError(f"version {record.version} cannot be pulled: it or a newer one is being written")
        try:
            expected = (_MAGIC, record.publication, record.version, len(self._memory), record.layout)
            found = _HEADER.unpack_from(self._memory)
            if found != expected:
                state = "an unfinished push" if found[1] == _UNSEALED else f"version {found[2]}"
                raise UnknownVersionError(f"version {record.version} is no longer kept: its slot holds {state} by now")
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

    def _write_header(self, publication: int, version: int, digest: bytes) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, publication, version, len(self._memory), digest)
