"""The transport of one host: trainer ranks write into a buffer of shared memory, and generators read it in place.

TorchStore only introduces the buffers. It hears of each one once, before the first push into it; from then on the
buffer's own header says which version it holds, because telling TorchStore at every push takes as long as copying a
small model's weights.

Weights are hundreds of tensors. On a CPU, torch splits each operation among its threads and joins them again, which
takes 70 microseconds, as long as copying one of them; so each thread of `Workers` runs whole operations, one after the
other. From and to a GPU, `copy` queues hundreds of copies in one call and waits for none. Only pinned memory of the
host allows that: the GPU then reads and writes it by itself. Weights are cast before they travel.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rl.system.hardware import host_identity
from rl.system.ranks import all_gather, own_rank
from rl.weights.memory import BufferLocation, WeightBuffer, held_version, is_kept
from rl.weights.store import VersionIndex
from rl.weights.version import (
    Fetch,
    Manifest,
    Shard,
    TensorSpec,
    Transport,
    VersionRecord,
    WeightsError,
    on_rank_0,
    raise_on_every_rank,
)

# vLLM replaces the public function.
_set_num_threads = torch._C.set_num_threads  # pyright: ignore[reportPrivateUsage]
_CPU = -1  # of `get_device`
_PIECE_BYTES = 8 << 20  # larger tensors are cut, so that no thread is left with a long copy at the end

Region = tuple[slice, ...]
Pair = tuple[torch.Tensor, torch.Tensor]
"""Destination and source, of equal shapes."""


class SharedMemory(Transport):
    """A record's `location` is the `BufferLocation` of the buffer that holds the version."""

    fallback_notice = "shared memory carries the weights"
    between_hosts = False

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "SharedMemorySender":
        del asked  # it needs memory that the host has or lacks
        return SharedMemorySender(index, reader_timeout_s)

    def receiver(self, broadcast: Callable[..., Any]) -> "SharedMemoryReceiver":
        del broadcast  # every rank reads the buffer itself
        return SharedMemoryReceiver()

    def current(self, record: VersionRecord) -> VersionRecord | None:
        """The version that the record's buffer holds now; None while it holds no whole one."""
        _check_within_reach(record)
        return held_version(record, record.location)


@dataclass(slots=True)
class _Slot:
    """A buffer, and what a trainer rank knows of it."""

    buffer: WeightBuffer
    frozen_id: bytes = b""
    """Of the frozen tensors in it; empty if they may be incomplete."""
    places: dict[str, tuple[Region, torch.Tensor]] = field(default_factory=dict[str, tuple[Region, torch.Tensor]])
    """Views of it by name, with the regions that they show: hundreds of views take long to make."""

    def place(self, spec: TensorSpec, region: Region) -> torch.Tensor:
        """Where a part of a tensor lies."""
        known, place = self.places.get(spec.name, (None, None))
        if place is None or known != region:
            place = self.buffer.tensor(spec)[region]
            self.places[spec.name] = region, place
        return place


class SharedMemorySender:
    """Casts this rank's shards into their places in the buffer."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float) -> None:
        self._index = index
        self._reader_timeout_s = reader_timeout_s
        self._rank = own_rank()
        self._specs: dict[str, TensorSpec] = {}
        self._slots: Sequence[_Slot] = ()
        self._newest: _Slot | None = None  # on rank 0
        self._workers = Workers()

    async def prepare(self, manifest: Manifest) -> None:
        """Rank 0 allocates the buffers and the others map them. Raises `WeightsError` on every rank if it cannot."""
        self._specs = {spec.name: spec for spec in manifest}
        self._slots = [_Slot(buffer) for buffer in await asyncio.to_thread(self._make_buffers, manifest)]

    def _make_buffers(self, manifest: Manifest) -> Sequence[WeightBuffer]:
        problem: WeightsError | None = None
        buffers: list[WeightBuffer] = []
        if len(set(all_gather(host_identity()))) > 1:
            raise WeightsError("the trainer's ranks are on several hosts; weights need weight_transport='network'")
        try:
            buffers += WeightBuffer.create_for(manifest) if self._rank == 0 else ()
        except WeightsError as error:
            problem = error
        locations = raise_on_every_rank(problem, value=[buffer.location for buffer in buffers])[0]
        buffers += [WeightBuffer.open(location, writable=True) for location in locations if self._rank > 0]
        for buffer in buffers:
            buffer.pin()
        return buffers

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, bool]:
        """Writes into the buffer that does not hold the newest version, which stays if this one fails."""
        slot = self._slots[await on_rank_0(partial(self._begin, record))]
        # Not in a thread: the threads of `cpu_thread_env` are quick only while one Python thread computes.
        record = replace(record, location=slot.buffer.location)
        return record, self._write(slot, record, shards)

    async def _begin(self, record: VersionRecord) -> int:
        """On rank 0: chooses a buffer, introduces it, and locks readers out before any rank writes."""
        index, slot = next(pair for pair in enumerate(self._slots) if pair[1] is not self._newest)
        location = slot.buffer.location
        if location not in [known.location for known in self._index.records]:
            await self._index.announce(replace(record, location=location))
        await asyncio.to_thread(slot.buffer.begin_write, self._reader_timeout_s)
        return index

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Lets go of the buffers. A reader keeps its own hold on the one that it is reading."""
        del withdrawn
        for slot in self._slots:
            slot.buffer.close()
        self._slots, self._newest = (), None

    @torch.no_grad()
    def _write(self, slot: _Slot, record: VersionRecord, shards: Iterable[Shard]) -> bool:
        """Writes this rank's shards. Rank 0 holds the lock for all, and seals the header once all have written."""
        problem: Exception | None = None
        has_frozen, slot.frozen_id = slot.frozen_id == record.frozen_id, b""
        pairs: list[Pair] = []
        try:
            for name, _, local, region in shards:
                spec = self._specs[name]
                if local is not None and not (spec.frozen and has_frozen):
                    pairs.append((slot.place(spec, region), local))
            self._copy(pairs)
        except Exception as error:  # of any kind, because the other ranks wait to hear of it
            problem = error
        try:
            raise_on_every_rank(problem)
        except BaseException:
            slot.buffer.abandon_write()
            raise
        slot.frozen_id = record.frozen_id
        if self._rank > 0:
            return False
        slot.buffer.seal(record)
        before, self._newest = self._newest, slot
        return slot.buffer.is_unchanged(record, before and before.buffer)

    def _copy(self, pairs: Sequence[Pair]) -> None:
        """Casts each source into its place. All bytes are there when it returns."""
        (copy if on_gpu(source for _, source in pairs) else self._workers.copy)(pairs)


class SharedMemoryReceiver:
    """Maps the buffers of the trainer that pushes, and keeps them mapped."""

    def __init__(self, kind: type[WeightBuffer] = WeightBuffer) -> None:
        self._kind = kind
        self._buffers: dict[BufferLocation, WeightBuffer] = {}

    @contextlib.contextmanager
    def open(self, record: VersionRecord, fetch: Fetch | None) -> Generator[WeightBuffer]:
        """The buffer that holds the version, locked against writers and checked against its checksums."""
        del fetch  # it is all here
        _check_within_reach(record)
        buffer = self._buffers.get(record.location) or self._map(record.location)
        with buffer.reading(record):
            buffer.check_checksums(record)
            yield buffer

    def _map(self, location: BufferLocation) -> WeightBuffer:
        """Opens a buffer, and closes those whose trainer was restarted or has dropped their adapter."""
        buffer = self._kind.open(location)
        buffer.pin()
        for gone in [known for known in self._buffers if not is_kept(known)]:
            self._buffers.pop(gone).close()
        self._buffers[location] = buffer
        return buffer


def _check_within_reach(record: VersionRecord) -> None:
    """Raises ValueError for a buffer of another host."""
    if record.host != host_identity():
        raise ValueError(
            "the weights lie in the shared memory of another host or container; the trainer needs"
            " weight_transport='network' to reach this one"
        )


def on_gpu(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether there are tensors and all are on a GPU."""
    places = [tensor.is_cuda for tensor in tensors]
    return bool(places) and all(places)


def copy(pairs: Sequence[Pair], batch_bytes: int = 256 << 20) -> None:
    """Copies each source into its destination, cast where the source lies. All have arrived when it returns.

    `batch_bytes` are cast at a time, and so need memory twice.
    """
    devices = {tensor.get_device() for pair in pairs for tensor in pair}
    if _CPU in devices:
        for batch in _batches(pairs, batch_bytes):
            _queue([(to, source.to(to.dtype)) for to, source in batch])
    else:  # between GPUs the copy casts by itself, and only the result travels
        _queue(pairs)
    for device in devices - {_CPU}:  # by number, because threads other than the engine's have another current device
        torch.cuda.synchronize(device)


def _queue(pairs: Sequence[Pair]) -> None:
    """Queues copies in one call, and in another those of slices of columns, of which one makes a call slow for all."""
    # The public way is one call of Python for each tensor; a mixture of experts has thousands.
    copy_all = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]
    whole = [to.is_contiguous() and source.is_contiguous() for to, source in pairs]
    for kind in dict.fromkeys(whole):
        alike = [pair for pair, is_whole in zip(pairs, whole, strict=True) if is_whole == kind]
        copy_all([to for to, _ in alike], [source for _, source in alike], non_blocking=True)


def _batches(pairs: Iterable[Pair], max_bytes: int) -> Iterator[Sequence[Pair]]:
    """Pairs of at most `max_bytes` together, or one pair."""
    batch: list[Pair] = []
    num_bytes = 0
    for pair in pairs:
        num_bytes += pair[0].nbytes
        if batch and num_bytes > max_bytes:
            yield batch
            batch, num_bytes = [], pair[0].nbytes
        batch.append(pair)
    if batch:
        yield batch


class Workers:
    """As many threads as torch uses in this process. They end with the process, or when this object is collected."""

    def __init__(self) -> None:
        """The number of threads is the calling thread's `torch.get_num_threads()`."""
        self._num_threads = torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        if self._num_threads > 1:
            self._pool = ThreadPoolExecutor(self._num_threads, "weights", initializer=use_one_thread)
            all_here = threading.Barrier(self._num_threads)
            wait([self._pool.submit(all_here.wait) for _ in range(self._num_threads)])
            _set_num_threads(self._num_threads)  # of this thread, and of those to come

    def run(self, operations: Iterable[Callable[[], object]]) -> None:
        """Runs all operations, in any order. The longest should come first. Raises the error of one that fails."""
        operations = list(operations)
        left = iter(operations)

        def work() -> None:
            with torch.no_grad():
                for operation in left:  # a list's iterator gives each item to one thread
                    operation()

        if self._pool is None or len(operations) < 2:
            work()
        else:
            for future in wait([self._pool.submit(work) for _ in range(self._num_threads)]).done:
                future.result()

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copies each (destination, source) pair of equal shapes, and casts. Large ones are cut along dim 0."""
        self.run(self.copies(pairs))

    def copies(self, pairs: Iterable[Pair]) -> list[Callable[[], object]]:
        """The operations of `copy`, which can be run any number of times."""
        pieces: list[Pair] = []
        for destination, source in pairs:
            num_pieces = -(-destination.nbytes // _PIECE_BYTES)
            if num_pieces > 1 and self._pool is not None:
                pieces += zip(destination.chunk(num_pieces), source.chunk(num_pieces), strict=True)
            else:
                pieces.append((destination, source))
        pieces.sort(key=lambda piece: piece[0].nbytes, reverse=True)
        return [partial(destination.copy_, source) for destination, source in pieces]


def use_one_thread() -> None:
    """Makes torch's operations run in this thread alone."""
    torch.get_num_threads()  # a thread takes the number of the whole process when torch first looks for it there
    _set_num_threads(1)
