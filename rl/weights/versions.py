"""What is published: the manifest of a model's tensors, the record of one version of them, and their checksums.

    trainer/push.py  -> VersionIndex.announce -> the index in TorchStore: a record for each place where versions lie
    generator/actor  -> find_record           -> asks the transport which version lies in each of these places now

Some transports overwrite a place without an entry in TorchStore, so the transport has the last word.

Checksums are sums of the tensors' bits, which cost little compared with copying the tensors. They catch tensors that
were written wrongly, not written, or overwritten. They do not protect against an attacker, and do not notice values
that only changed places.
"""

import hashlib
import math
import pickle
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Protocol

import torch

from rl.lora import LoRAConfig
from rl.weights.transport import load_transport

LIVING_VERSIONS = 2
"""How many published versions stay whole: the newest can be written while the one before is read."""

RECEIVERS_KEY = "ownloop/weight_receivers"
"""TorchStore key of the other hosts that receive weights, as the plug-in describes them that sends them there."""

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
    """The full tensor's shape, before any sharding."""
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the buffer."""
    frozen: bool = False
    """Whether no optimizer step changes it."""

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
    """The number of this push, counted from 0 by its publisher. It differs for two pushes of one version."""
    manifest: Manifest
    dtype: torch.dtype
    """Of every floating-point tensor in the manifest."""
    transport: str
    """A name in `transport.transports()`."""
    host: str
    """`host_identity()` of the publisher."""
    layout: bytes
    """`manifest_checksum` of the manifest."""
    full_checksums: bool
    """Whether the checksums cover every byte, or samples."""
    frozen_id: bytes = bytes(16)
    """Of a UUID. Equal in two versions only if their frozen tensors are equal, too."""
    policy: str | None = None
    """The adapter that was published; None if these are the weights of the model itself."""
    lora: LoRAConfig | None = None
    """The adapter's shape and scale; its tensors go by PEFT's names, B unscaled. None for the model itself."""
    location: Any = None
    """Where the tensors lie, in the transport's own terms; None if they are in TorchStore, under `key`."""
    checksums: tuple[int, ...] = ()
    """`element_sum` of every tensor, in the manifest's order; empty if the tensors' checksums lie beside them."""

    def key(self, name: str, *, frozen: bool = False) -> str:
        """The key in TorchStore of one of its tensors. Versions with the same `frozen_id` share the frozen ones."""
        push = f"frozen/{self.frozen_id.hex()}" if frozen else f"{self.version}/{self.push_index}"
        return f"{index_key(self.policy)}/{push}/{name}"

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
    """TorchStore key of a policy's index, from which `living_versions` reads what can be pulled."""
    return INDEX_KEY if policy is None else f"{INDEX_KEY}/adapters/{policy}"


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight leaves a trainer that publishes or exports in `dtype`.

    The selection bias of a router stays in float32, in checkpoints and generators alike: rounded, it chooses others.
    """
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


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


class Store(Protocol):
    """A key-value store; TorchStore's `LocalClient` is one."""

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor, a DTensor's shard or any object that can be pickled."""
        ...

    async def get(self, key: str) -> Any:
        """Fetches a value, a DTensor as the full tensor. Raises KeyError if there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Removes a key."""
        ...


class VersionIndex:
    """The publishing side of one policy's index: a tuple of `VersionRecord`s under its key, which rank 0 writes."""

    def __init__(self, get_store: Callable[[], Awaitable[Store]]) -> None:
        """`get_store` is called whenever the store is needed."""
        self.get_store = get_store
        self.records: tuple[VersionRecord, ...] = ()

    async def announce(self, record: VersionRecord) -> tuple[VersionRecord, ...]:
        """Adds a record to the index. Returns the records that drop out. Raises `WeightsError`."""
        store = await self.get_store()
        kept = (*self.records, record)[-LIVING_VERSIONS:]
        try:
            await store.put(index_key(record.policy), kept)
        except Exception as error:  # Monarch's own types if TorchStore is dead
            raise WeightsError(f"version {record.version} was not published: TorchStore failed: {error}") from error
        dropped = tuple(old for old in self.records if old not in kept)
        self.records = kept
        return dropped

    async def withdraw(self) -> tuple[VersionRecord, ...]:
        """Deletes the index. Returns the records that it had. Raises `WeightsError`."""
        records, self.records = self.records, ()
        if records:
            try:
                await (await self.get_store()).delete(index_key(records[0].policy))
            except Exception as error:  # Monarch's own types if TorchStore is dead
                raise WeightsError(f"versions were not withdrawn: TorchStore failed: {error}") from error
        return records


def is_missing(error: Exception) -> bool:
    """Whether `Store.get` raised this because there is no such key: TorchStore raises KeyError for its faults too."""
    return isinstance(error, KeyError) and "Unable to locate" in str(error)


async def receivers_on_hosts(store: Store) -> tuple[Any, ...]:
    """What is at `RECEIVERS_KEY`; empty if no generator is on another host.

    Raises `WeightsError` if TorchStore does not answer.
    """
    try:
        return await store.get(RECEIVERS_KEY)
    except Exception as error:  # Monarch's own types if TorchStore is dead
        if is_missing(error):
            return ()
        raise WeightsError(f"TorchStore did not say which generator hosts there are: {error}") from error


async def find_record(store: Store, version: int, policy: str | None = None) -> VersionRecord:
    """The record of a policy's version that can be pulled; None stands for the model itself.

    Raises `UnknownVersionError`, a ValueError, naming the versions that can be pulled, ValueError if the weights are
    out of reach, and `WeightsError` if TorchStore does not answer or the publisher is gone.
    """
    return find_version(await living_versions(store, policy), version)


async def living_versions(store: Store, policy: str | None = None) -> tuple[VersionRecord, ...]:
    """The records of a policy's versions that can be pulled, oldest first. Raises as `find_record` does."""
    try:
        announced: tuple[VersionRecord, ...] = await store.get(index_key(policy))
    except Exception as error:  # Monarch's own types if TorchStore is dead
        if not is_missing(error):
            raise WeightsError(f"TorchStore did not say which versions there are: {error}") from error
        announced = ()
    living = [now for record in announced if (now := load_transport(record.transport).current(record)) is not None]
    return tuple(sorted(living, key=lambda record: record.push_index))


def find_version(records: Iterable[VersionRecord], version: int) -> VersionRecord:
    """Picks a version's record; the newest if the version was published twice.

    Raises `UnknownVersionError` naming the versions that can be pulled.
    """
    by_version = {record.version: record for record in records}
    if version not in by_version:
        living = ", ".join(map(str, sorted(by_version))) or "none; nothing was pushed yet"
        raise UnknownVersionError(f"version {version} cannot be pulled; versions that can: {living}")
    return by_version[version]


LINE_BYTES = 64
"""Every tensor in a buffer begins at a multiple of this and is padded with zeros to the next."""

_MODULUS = 1 << 64
_SAMPLED_LINES = 64
_SPREAD = 40503  # 2^16 / golden ratio: samples differ in their column for any width of a row


class BufferChecksums:
    """Checksums of the tensors of a buffer: sums of their 64-bit words, modulo 2^64.

    Full checksums cover every byte. Sampled ones cover 64 lines of 64 bytes of a tensor above 4 KiB, spread over all of
    it so that every rank's shard is sampled; a single wrong word elsewhere goes unnoticed.
    """

    def __init__(self, extents: Sequence[tuple[int, int]], *, full: bool) -> None:
        """`extents` holds every tensor's first byte and its number of bytes."""
        self._lines = [(offset // LINE_BYTES, -(-size // LINE_BYTES)) for offset, size in extents]
        self._full = full
        if not full:
            sampled = [first + _sample(num_lines) for first, num_lines in self._lines]
            self._sampled = torch.cat([torch.zeros(0, dtype=torch.int64), *sampled])
            self._owners = torch.repeat_interleave(torch.tensor([len(lines) for lines in sampled], dtype=torch.int64))

    def __call__(self, data: torch.Tensor) -> tuple[int, ...]:
        """The checksum of every tensor, from a buffer's bytes (uint8 [N], N a multiple of 64)."""
        lines = data.view(torch.int64).view(-1, LINE_BYTES // 8)
        if not self._lines:
            return ()
        if self._full:
            return tuple(torch.stack([lines[first : first + count].sum() for first, count in self._lines]).tolist())
        if self._sampled.device != data.device:
            self._sampled, self._owners = self._sampled.to(data.device), self._owners.to(data.device)
        sums = torch.zeros(len(self._lines), dtype=torch.int64, device=data.device)
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
