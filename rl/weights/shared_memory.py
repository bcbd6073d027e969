"""The transport of one host: trainer ranks write into a buffer of shared memory, and generators read it in place.

TorchStore only introduces the buffers. It hears of each one once, before the first push into it; from then on the
buffer's own header says which version it holds, because telling TorchStore at every push takes as long as copying a
small model's weights.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl.system.hardware import host_identity
from rl.weights import copies
from rl.weights.buffer import BufferLocation, Sealed, WeightBuffer, held_version, is_kept, is_unchanged
from rl.weights.copies import Workers
from rl.weights.ranks import CANNOT_PUBLISH, all_gather, on_rank_0, own_rank, raise_on_every_rank
from rl.weights.transport import Shard
from rl.weights.versions import Manifest, Store, TensorSpec, VersionIndex, VersionRecord, WeightsError


class SharedMemory:
    """A record's `location` is the `BufferLocation` of the buffer that holds the version."""

    fallback_notice = "shared memory carries the weights"
    between_hosts = False
    without_gpus = ""

    def suits(self) -> bool:
        """Always."""
        return True

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


class SharedMemorySender:
    """Casts this rank's shards into their places in the buffer."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float) -> None:
        self._index = index
        self._reader_timeout_s = reader_timeout_s
        self._rank = own_rank()
        self._specs: dict[str, TensorSpec] = {}
        self._buffers: Sequence[WeightBuffer] = ()
        self._introduced: set[BufferLocation] = set()
        self._sealed: Sealed | None = None  # the newest version, on rank 0
        self._frozen: dict[BufferLocation, bytes] = {}  # the `frozen_id` of what lies in each buffer
        self._workers: Workers | None = None

    async def prepare(self, manifest: Manifest) -> None:
        """Rank 0 allocates the buffers and the others map them. Raises `WeightsError` on every rank if it cannot."""
        await asyncio.to_thread(self._prepare, manifest)

    def _prepare(self, manifest: Manifest) -> None:
        self._buffers = self._make_buffers(manifest)
        self._specs = {spec.name: spec for spec in manifest}
        self._workers = Workers()

    def _make_buffers(self, manifest: Manifest) -> Sequence[WeightBuffer]:
        problem: WeightsError | None = None
        buffers: list[WeightBuffer] = []
        if len(set(all_gather(host_identity()))) > 1:
            raise WeightsError("the trainer's ranks are on several hosts; weights need weight_transport='network'")
        try:
            buffers += WeightBuffer.create_for(manifest) if self._rank == 0 else ()
        except WeightsError as error:
            problem = error
        raise_on_every_rank(problem, CANNOT_PUBLISH)
        locations = all_gather([buffer.location for buffer in buffers])[0]
        buffers += [WeightBuffer.open(location, writable=True) for location in locations if self._rank > 0]
        for buffer in buffers:
            buffer.pin()
        return buffers

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, bool]:
        """Writes into the buffer that does not hold the newest version, which stays if this one fails."""
        buffer = self._buffers[await on_rank_0(partial(self._begin, record))]
        # Not in a thread: the threads of `cpu_thread_env` are quick only while one Python thread computes.
        record = replace(record, location=buffer.location)
        return record, self._write(buffer, record, shards)

    async def _begin(self, record: VersionRecord) -> int:
        """On rank 0: chooses a buffer, introduces it, and locks readers out before any rank writes."""
        newest = self._sealed and self._sealed[0]
        index, buffer = next(pair for pair in enumerate(self._buffers) if pair[1] is not newest)
        if buffer.location not in self._introduced:
            await self._index.announce(replace(record, location=buffer.location))
            self._introduced.add(buffer.location)
        await asyncio.to_thread(buffer.begin_write, self._reader_timeout_s)
        return index

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Lets go of the buffers. A reader keeps its own hold on the one that it is reading."""
        del withdrawn
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._sealed = (), None

    @torch.no_grad()
    def _write(self, buffer: WeightBuffer, record: VersionRecord, shards: Iterable[Shard]) -> bool:
        """Writes this rank's shards. Rank 0 holds the lock for all, and seals the header once all have written."""
        problem: Exception | None = None
        has_frozen = self._frozen.pop(buffer.location, None) == record.frozen_id
        try:
            pairs = [
                (buffer.tensor(self._specs[shard.name])[shard.region], shard.local)
                for shard in shards
                if shard.local is not None and not (has_frozen and self._specs[shard.name].frozen)
            ]
            self._copy(pairs)
        except Exception as error:  # of any kind, because the other ranks wait to hear of it
            problem = error
        try:
            raise_on_every_rank(problem, CANNOT_PUBLISH)
        except BaseException:
            buffer.abandon_write()
            raise
        self._frozen[buffer.location] = record.frozen_id
        if self._rank > 0:
            return False
        before, self._sealed = self._sealed, (buffer, buffer.checksums(record))
        buffer.seal(record, self._sealed[1])
        return is_unchanged(record, self._sealed, before)

    def _copy(self, pairs: Sequence[copies.Pair]) -> None:
        """Casts each source into its place. All bytes are there when it returns."""
        assert self._workers is not None
        copy = copies.copy if copies.on_gpu(source for _, source in pairs) else self._workers.copy
        copy(pairs)


class SharedMemoryReceiver:
    """Maps the buffers of the trainer that pushes, and keeps them mapped."""

    def __init__(self) -> None:
        self._buffers: dict[BufferLocation, WeightBuffer] = {}

    def feed(self, record: VersionRecord, store: Store) -> None:
        """Nothing has to be fetched."""
        del record, store

    @contextlib.contextmanager
    def open(self, record: VersionRecord, feed: None) -> Generator[WeightBuffer]:
        """The buffer that holds the version, locked against writers and checked against its checksums."""
        del feed
        _check_within_reach(record)
        location: BufferLocation = record.location
        buffer = self._buffers.get(location)
        if buffer is None:
            buffer = self._map(location)
            self._close_abandoned()
            self._buffers[location] = buffer
        with buffer.reading(record):
            buffer.check_checksums(record)
            yield buffer

    def _map(self, location: BufferLocation) -> WeightBuffer:
        buffer = WeightBuffer.open(location)
        buffer.pin()
        return buffer

    def _close_abandoned(self) -> None:
        """Closes buffers whose owner has let go of them: the trainer was restarted, or an adapter was dropped."""
        for location in [known for known in self._buffers if not is_kept(known)]:
            self._buffers.pop(location).close()


def _check_within_reach(record: VersionRecord) -> None:
    """Raises ValueError for a buffer of another host."""
    if record.host != host_identity():
        raise ValueError(
            "the weights lie in the shared memory of another host or container; the trainer needs"
            " weight_transport='network' to reach this one"
        )
