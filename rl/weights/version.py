"""What is published: a model's tensors, the record of one version of them, and the transports that carry it.

    trainer/push.py    -> a Sender of the transport   -> the bytes lie where the record's `location` says
                       -> rl/weights/store.py         -> TorchStore: the records of the newest versions
    generator/pull.py  <- a Receiver of the transport <- the record, from the controller or from TorchStore

A transport is one file and one row of `TRANSPORTS`, or in a plug-in an entry point of the group `ownloop.transports`.
This module does not import torch, because configurations name transports before any process starts.
"""

import asyncio
import hashlib
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from rl.lora import LoRAConfig
from rl.system.plugins import named_by

if TYPE_CHECKING:  # they load torch
    import torch
    import torch.distributed as dist

    from rl.weights.memory import WeightBuffer
    from rl.weights.store import VersionIndex

T = TypeVar("T")

LIVING_VERSIONS = 2
"""How many published versions stay whole: the newest can be written while the one before is read."""

HEADER_BYTES = 4096
"""Size of a buffer's header; the checksums follow it. A whole page, though the header needs less."""

LINE_BYTES = 64
"""Every tensor in a buffer begins at a multiple of this and is padded with zeros to the next."""

_CHECKSUM_BYTES = 8


def leaves_room(num_bytes: int, *, allocated: int, free: int, total: int) -> bool:
    """Whether a trainer's GPU has room for its part of two versions, and a tenth of its memory left for activations.

    Before the first step, training has not taken all of its memory: parameters, gradient and two moments in float32 are
    four times as large as two versions in bfloat16. Of this and the versions, `allocated` bytes are taken already.
    """
    return free - max(0, 5 * num_bytes - allocated) >= total // 10


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
    dtype: "torch.dtype"
    offset: int
    """Bytes from the start of the buffer."""
    frozen: bool = False
    """Whether no optimizer step changes it."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Manifest(tuple[TensorSpec, ...]):
    """The tensors of a version, in the order in which they lie in a buffer."""

    @cached_property
    def layout(self) -> bytes:
        """SHA-256 over names, shapes, dtypes and offsets."""
        return hashlib.sha256(repr(self).encode()).digest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as bytes that a process encodes and decodes once, because that takes milliseconds."""
        return _decoded, (_encoded(self),)


@lru_cache(maxsize=4)
def _encoded(manifest: Manifest) -> bytes:
    return pickle.dumps(tuple(manifest))


@lru_cache(maxsize=4)
def _decoded(encoded: bytes) -> Manifest:
    return Manifest(pickle.loads(encoded))


def build_manifest(
    tensors: Iterable[tuple[str, Sequence[int], "torch.dtype"]], frozen: Collection[str] = ()
) -> Manifest:
    """Lays out tensors one after the other, each at the start of a line. Raises ValueError for a duplicate name."""
    tensors = list(tensors)
    specs: dict[str, TensorSpec] = {}
    offset = HEADER_BYTES + _whole_lines(len(tensors) * _CHECKSUM_BYTES)
    for name, shape, dtype in tensors:
        if name in specs:
            raise ValueError(f"the tensor {name!r} occurs twice among the weights; each name may occur once")
        specs[name] = TensorSpec(name, tuple(shape), dtype, offset, name in frozen)
        offset += _whole_lines(specs[name].nbytes)
    return Manifest(specs.values())


def buffer_size(manifest: Manifest) -> int:
    """Size in bytes of a buffer for these tensors."""
    return max((spec.offset + _whole_lines(spec.nbytes) for spec in manifest), default=HEADER_BYTES)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """All that a generator needs to know to load one published version. Travels through TorchStore."""

    version: int
    """Policy version."""
    push_index: int
    """The number of this push, counted from 0 by its publisher. It differs for two pushes of one version."""
    manifest: Manifest
    dtype: "torch.dtype"
    """Of every floating-point tensor in the manifest."""
    transport: str
    """A name in `transports()`."""
    host: str
    """`host_identity()` of the publisher."""
    frozen_id: bytes = bytes(16)
    """Of a UUID. Equal in two versions only if their frozen tensors are equal, too."""
    policy: str | None = None
    """The adapter that was published; None if these are the weights of the model itself."""
    lora: LoRAConfig | None = None
    """The adapter's shape and scale; its tensors go by PEFT's names, B unscaled. None for the model itself."""
    location: Any = None
    """Where the tensors lie, in the transport's own terms; None if they are in TorchStore."""
    arithmetic: str = ""
    """`trainer.engines.base.Engine.arithmetic` of the publisher."""
    checksums: tuple[int, ...] = ()
    """`element_sum` of every tensor, in the manifest's order; empty if the tensors' checksums lie beside them."""


class VersionRecords:
    """The controller's own copies of the newest records, which save generators a lookup in TorchStore.

    Trainers' handles add them, and generators' look them up. A version that is not found here is looked up in
    TorchStore, which remains the directory.
    """

    def __init__(self) -> None:
        """Starts without records."""
        self._records: dict[str | None, tuple[VersionRecord, ...]] = {}

    def add(self, record: VersionRecord) -> None:
        """Adds the record of a version that was just published."""
        self._records[record.policy] = (*self._records.get(record.policy, ()), record)[-LIVING_VERSIONS:]

    def find(self, version: int, policy: str | None = None) -> VersionRecord | None:
        """The record of a policy's version, the newest if it was published several times. None if it is not known."""
        records = self._records.get(policy, ())
        return next((record for record in reversed(records) if record.version == version), None)

    def forget(self, policy: str) -> None:
        """Drops the records of an adapter."""
        self._records.pop(policy, None)


def weight_dtype(name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype in which a weight leaves a trainer that publishes or exports in `dtype`.

    The selection bias of a router stays in float32, in checkpoints and generators alike: rounded, it chooses others.
    """
    import torch

    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def corrupted(record: VersionRecord, spec: TensorSpec, what: str) -> WeightsError:
    """The error for a tensor that differs from the published one; `what` says how."""
    return WeightsError(
        f"version {record.version} is corrupted: {spec.name!r} is not what was published ({what}); it has to be pushed"
        " again"
    )


TRANSPORTS: Mapping[str, str] = {
    "gpu_memory": "rl.weights.gpu:GPUMemory",
    "shared_memory": "rl.weights.shared_memory:SharedMemory",
    "torchstore": "rl.weights.store:StoreTransport",
}
"""The transports of the core by name, as "module:class"."""


@cache
def transports() -> Mapping[str, str]:
    """Every transport by name, as "module:class". `auto` takes the first that suits and can carry the weights."""
    *preferred, last = TRANSPORTS.items()
    return dict((*preferred, *named_by("transports").items(), last))


def load_transport(name: str) -> "Transport":
    """The transport of a name in `transports()`."""
    return resolve_name(transports()[name])()


class Shard(NamedTuple):
    """What one trainer rank holds of one tensor."""

    name: str
    tensor: "torch.Tensor"
    """The engine's parameter, in the engine's dtype; a DTensor if it is sharded."""
    local: "torch.Tensor | None"
    """The part that this rank sends; None if another rank sends the same values."""
    region: tuple[slice, ...]
    """Where `local` lies in the full tensor; empty if it is the full tensor."""


class Sender(Protocol):
    """The end of a transport in a trainer rank. All ranks call each method together."""

    async def prepare(self, manifest: Manifest) -> None:
        """Called before the first version. Raises `WeightsError` on every rank if the transport cannot carry this."""
        ...

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, bool]:
        """Sends this rank's shards. When it returns on every rank, generators can pull the version.

        `record` lacks only the fields that belong to the transport; they are filled in in the record that is returned.
        The second value, which counts on rank 0, says whether all tensors are known to be as in the version before.
        Iterating over `shards` raises ValueError if they do not fit the manifest. Raises on all ranks if one fails.
        """
        ...

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Frees the memory of all versions. `withdrawn` are the versions of rank 0's index; no others are in use."""
        ...


Fetch = Callable[[str], "Future[Any]"]
"""Asks TorchStore for the value of a key, from any thread."""


class Receiver(Protocol):
    """The end of a transport in a generator rank."""

    def open(
        self, record: VersionRecord, fetch: Fetch | None
    ) -> "AbstractContextManager[WeightBuffer | Iterator[tuple[str, torch.Tensor]]]":
        """The version's tensors, whole and unchanging while inside: all in a buffer, or one after the other.

        `fetch` is None but on rank 0. Raises ValueError if the weights are out of reach, `UnknownVersionError` if the
        version is no longer kept, and `WeightsError` if it cannot be had; the iterator may raise `WeightsError` midway.
        """
        ...


class Transport(ABC):
    """One way for weights to travel."""

    fallback_notice: str
    """How a warning begins that says that `auto` fell back on this transport."""
    between_hosts: bool | None = None
    """True if generators have to be on other hosts than the trainer, False if on the same, None for either."""
    without_gpus = ""
    """The transport that carries an adapter, which is small, in place of this one; empty if this needs no GPUs."""

    def suits(self) -> bool:
        """Whether `auto` may take this transport in this process."""
        return True

    @abstractmethod
    def sender(self, index: "VersionIndex", *, reader_timeout_s: float, asked: bool) -> Sender:
        """A trainer rank's end. A push waits at most `reader_timeout_s` for readers of the version that it replaces.

        `asked` says whether the user named this transport, so that it may take more than `auto` should.
        """

    @abstractmethod
    def receiver(self, broadcast: Callable[..., Any]) -> Receiver:
        """A generator rank's end. `broadcast(x)` on rank 0 and `broadcast()` elsewhere return rank 0's `x`."""

    def current(self, record: VersionRecord) -> VersionRecord | None:
        """The version that can be pulled from where `record` says; None if there is none at this moment.

        Raises ValueError if the weights are out of reach, and `WeightsError` if the publisher is gone.
        """
        return record


def raise_on_every_rank(
    problem: Exception | None,
    message: str = "trainer rank {rank} could not publish its weights",
    group: "dist.ProcessGroup | None" = None,
    *,
    value: Any = None,
) -> list[Any]:
    """A barrier that raises on all ranks if one has a problem, so that no rank waits for a rank that gave up.

    The rank with the problem raises it; the others raise `WeightsError` with `message`, which names `{rank}`. Otherwise
    returns every rank's `value`.
    """
    from rl.system.ranks import all_gather  # here and below: it loads torch

    outcomes = all_gather((None if problem is None else str(problem), value), group)
    if problem is not None:
        raise problem
    for rank, (text, _) in enumerate(outcomes):
        if text is not None:
            raise WeightsError(f"{message.format(rank=rank)}: {text}")
    return [each for _, each in outcomes]


async def on_rank_0(work: Callable[[], Awaitable[T]]) -> T:
    """What rank 0's work for a push returns, on every rank. Raises on all ranks if it fails. A collective."""
    from rl.system.ranks import num_ranks, own_rank

    if num_ranks() == 1:
        return await work()
    result: Any = None
    problem: Exception | None = None
    try:
        result = await work() if own_rank() == 0 else None
    except Exception as error:  # of any kind, because the other ranks wait to hear of it
        problem = error
    return (await asyncio.to_thread(raise_on_every_rank, problem, value=result))[0]
