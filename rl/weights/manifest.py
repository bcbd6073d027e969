"""What is published: the manifest of a model's tensors, and the record of one version of them.

This module opens no files and starts no processes. `transport.py` says how the bytes travel and `registry.py` finds a
version; `trainer/push.py` publishes and `generator/pull.py` loads.
"""

import hashlib
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from rl.lora import LoRAConfig
from rl.weights.checksums import LINE_BYTES

LIVING_VERSIONS = 2
"""How many published versions stay whole: the newest can be written while the one before is read."""

INDEX_KEY = "ownloop/weights"
"""TorchStore key of the model's index, a tuple of `VersionRecord`s; see `index_key`."""

HEADER_BYTES = 4096
"""Size of a buffer's header; the checksums follow it. A whole page, though the header needs less."""

_CHECKSUM_BYTES = 8


class WeightsError(RuntimeError):
    """Weights could not be published or loaded, through no mistake of the caller."""


class PublisherGoneError(WeightsError):
    """The process that published the weights has died, and they with it."""


class UnknownVersionError(ValueError):
    """The requested version was never published, or is no longer kept."""


class WeightsMismatchError(ValueError):
    """The published tensors do not fit the model that should load them."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor, and its place in a buffer."""

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
    """All that a generator needs to know to load one published version. Travels through TorchStore."""

    version: int
    """Policy version."""
    push_index: int
    """The number of this push, counted from 0 by its publisher. It tells two pushes of one version apart."""
    manifest: Manifest
    dtype: torch.dtype
    """Of every floating-point tensor in the manifest."""
    transport: str
    """A row of `transport.TRANSPORTS`."""
    host: str
    """`host_identity()` of the publisher."""
    layout: bytes
    """`manifest_checksum` of the manifest."""
    full_checksums: bool
    """Whether the checksums cover every byte, or samples."""
    policy: str | None = None
    """The adapter that was published; None if these are the weights of the model itself."""
    lora: LoRAConfig | None = None
    """The adapter's shape and scale; its tensors go by PEFT's names, B unscaled. None for the model itself."""
    location: Any = None
    """Where the tensors lie, in the transport's own terms; None if they are in TorchStore, under `key`."""
    checksums: tuple[int, ...] = ()
    """`element_sum` of every tensor, in the manifest's order; empty if the tensors' checksums lie beside them."""

    def key(self, name: str) -> str:
        """The key in TorchStore of one of its tensors."""
        return f"{index_key(self.policy)}/{self.version}/{self.push_index}/{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the manifest as bytes that a process decodes once, because decoding takes milliseconds."""
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


def index_key(policy: str | None) -> str:
    """TorchStore key of a policy's index. `registry.py` turns an index into the versions that can be pulled now."""
    return INDEX_KEY if policy is None else f"{INDEX_KEY}/adapters/{policy}"


def build_manifest(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> Manifest:
    """Lays out tensors one after the other, each at the start of a line. Raises ValueError for a duplicate name."""
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
    """Size in bytes of a buffer for these tensors."""
    return max((spec.offset + _whole_lines(spec.nbytes) for spec in manifest), default=HEADER_BYTES)


def manifest_checksum(manifest: Manifest) -> bytes:
    """SHA-256 over names, shapes, dtypes and offsets."""
    return hashlib.sha256(repr(manifest).encode()).digest()


def corrupted(record: VersionRecord, spec: TensorSpec, what: str) -> WeightsError:
    """The error for a tensor that differs from the published one; `what` says how."""
    return WeightsError(
        f"version {record.version} is corrupted: {spec.name!r} is not what was published ({what}); it has to be pushed"
        " again"
    )
