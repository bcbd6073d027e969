"""What a published set of weights is: its manifest and its record.

This module knows no files and no processes. `buffer.py` holds the memory that carries weights on one host and
`registry.py` finds a version; `trainer/push.py` publishes and `generator/pull.py` loads.
"""

import hashlib
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import torch

from rl.weights.checksums import LINE_BYTES

Transport = Literal["shared_memory", "torchstore"]
"""How the bytes travel: in place on one host, or through TorchStore between any hosts."""

LIVING_VERSIONS = 2
"""How many published versions stay whole: the newest can be written while the one before is read."""

INDEX_KEY = "ownloop/weights"
"""TorchStore key of a tuple of `VersionRecord`s: every version that lies there, and each buffer's first version."""

HEADER_BYTES = 4096
"""What precedes the checksums in a buffer."""

_CHECKSUM_BYTES = 8


class WeightsError(RuntimeError):
    """Weights could not be published or taken in, through no mistake of the caller."""


class UnknownVersionError(ValueError):
    """A version was asked for that was never published or is no longer kept."""


class WeightsMismatchError(ValueError):
    """Published tensors are not those of the model that should take them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one tensor lies in a buffer."""

    name: str
    """Hugging Face parameter name."""
    shape: tuple[int, ...]
    """The full tensor's shape, whatever its sharding."""
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the buffer."""

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
    push_index: int
    """Counts one publisher's pushes; tells apart two pushes of the same version."""
    manifest: Manifest
    dtype: torch.dtype
    """Of every floating-point tensor in the manifest."""
    transport: Transport
    host: str
    """`host_identity()` of the publisher."""
    buffer: tuple[int, int, int] | None
    """Process id, file descriptor and inode of the buffer; None where the tensors are in TorchStore."""
    layout: bytes
    """`manifest_checksum` of the manifest."""
    full_checksums: bool
    """Whether the checksums look at every byte or at samples."""
    checksums: tuple[int, ...] = ()
    """`element_sum` of every tensor in the manifest's order, where they are in TorchStore; a buffer carries its own."""

    def key(self, name: str) -> str:
        """The key in TorchStore of one of its tensors."""
        return f"{INDEX_KEY}/{self.version}/{self.push_index}/{name}"

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


def build_manifest(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> Manifest:
    """Lays tensors out behind header and checksums, each aligned to a line. Raises ValueError for a duplicate name."""
    tensors = list(tensors)
    specs: dict[str, TensorSpec] = {}
    offset = HEADER_BYTES + _whole_lines(len(tensors) * _CHECKSUM_BYTES)
    for name, shape, dtype in tensors:
        if name in specs:
            raise ValueError(f"the tensor {name!r} occurs twice among the weights; each name may occur once")
        specs[name] = TensorSpec(name, tuple(shape), dtype, offset)
        offset += _whole_lines(specs[name].nbytes)
    return tuple(specs.values())


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def buffer_size(manifest: Manifest) -> int:
    """Bytes that a buffer for these tensors takes."""
    return max((spec.offset + _whole_lines(spec.nbytes) for spec in manifest), default=HEADER_BYTES)


def manifest_checksum(manifest: Manifest) -> bytes:
    """SHA-256 over names, shapes, dtypes and offsets."""
    return hashlib.sha256(repr(manifest).encode()).digest()


def corrupted(record: VersionRecord, spec: TensorSpec, what: str) -> WeightsError:
    """The error of a tensor that is not what was published."""
    return WeightsError(
        f"version {record.version} is corrupted: {spec.name!r} is not what was published ({what}); it has to be pushed"
        " again"
    )
