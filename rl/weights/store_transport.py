"""The transport between any hosts: trainer ranks put their shards into TorchStore, and generators get whole tensors.

Rank 0 of a generator gets one tensor after the other and broadcasts it, so no rank ever holds a second copy of the
model for this.
"""

import asyncio
import contextlib
import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rl.weights.ranks import CANNOT_PUBLISH, all_gather, on_rank_0, raise_on_every_rank
from rl.weights.transport import Feed, Shard
from rl.weights.versions import (
    Manifest,
    Store,
    TensorSpec,
    VersionIndex,
    VersionRecord,
    WeightsError,
    add_up,
    corrupted,
    element_sum,
)

NamedTensor = tuple[str, torch.Tensor]

_MAX_PUTS_IN_FLIGHT = 8
_QUEUED_TENSORS = 2  # one that is loaded and one that is fetched meanwhile; each may be a large embedding
_POLL_S = 0.002


class StoreTransport:
    """A record has no `location`: `VersionRecord.key` says where each tensor is."""

    fallback_notice = "TorchStore carries the weights, which takes tens of times longer"
    between_hosts = None
    without_gpus = ""

    def suits(self) -> bool:
        """Always."""
        return True

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "StoreSender":
        del reader_timeout_s, asked  # a version gets keys of its own, so no reader is in the way
        return StoreSender(index)

    def receiver(self, broadcast: Callable[..., Any]) -> "StoreReceiver":
        return StoreReceiver(broadcast)

    def current(self, record: VersionRecord) -> VersionRecord:
        """The record itself: a version stays as it is until the index drops it."""
        return record


class StoreSender:
    """Puts this rank's shards into TorchStore, under keys that belong to one push."""

    def __init__(self, index: VersionIndex) -> None:
        self._index = index
        self._specs: dict[str, TensorSpec] = {}
        self._checksums: tuple[int, ...] | None = None  # of the newest version
        self._frozen: dict[bytes, dict[str, int]] = {}  # the sums of frozen tensors that were put, by `frozen_id`

    async def prepare(self, manifest: Manifest) -> None:
        """TorchStore takes any weights."""
        self._specs = {spec.name: spec for spec in manifest}

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, bool]:
        """Puts the shards, waits until the other ranks have put theirs, and then puts the version into the index."""
        problem: Exception | None = None
        sums: dict[str, int] = {}
        try:
            sums = await self._put_all(record, shards)
        except ValueError as error:
            problem = error
        except Exception as error:  # Monarch's own types if TorchStore is dead
            problem = WeightsError(f"TorchStore did not take version {record.version}: {error}")
        await asyncio.to_thread(raise_on_every_rank, problem, CANNOT_PUBLISH)
        self._frozen = {record.frozen_id: {name: each for name, each in sums.items() if self._specs[name].frozen}}
        of_ranks = await asyncio.to_thread(all_gather, sums)
        checksums = tuple(add_up(of_rank.get(spec.name, 0) for of_rank in of_ranks) for spec in record.manifest)
        record = replace(record, checksums=checksums, full_checksums=True)

        async def announce() -> None:
            await self.close(await self._index.announce(record))

        await on_rank_0(announce)
        before, self._checksums = self._checksums, checksums
        return record, before == checksums

    async def _put_all(self, record: VersionRecord, shards: Iterable[Shard]) -> dict[str, int]:
        """Puts a few shards at a time, frozen ones once. Returns the `element_sum` of each."""
        limit = asyncio.Semaphore(_MAX_PUTS_IN_FLIGHT)
        has_frozen, sums = record.frozen_id in self._frozen, dict(self._frozen.get(record.frozen_id, {}))
        store = await self._index.get_store()

        async def put(shard: Shard) -> None:
            async with limit:
                # A clone, because pickling a view would ship its whole storage.
                spec = self._specs[shard.name]
                value = shard.tensor.to(spec.dtype, copy=True).contiguous()
                if shard.local is not None:
                    sums[shard.name] = element_sum(value.to_local() if isinstance(value, DTensor) else value)
                await store.put(record.key(shard.name, frozen=spec.frozen), value)

        # TorchStore waits for a DTensor's shards from all ranks, replicated ones included.
        mine = [shard for shard in shards if isinstance(shard.tensor, DTensor) or shard.local is not None]
        await asyncio.gather(*(put(each) for each in mine if not (has_frozen and self._specs[each.name].frozen)))
        return sums

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Deletes the tensors of versions that are out of the index, but not frozen ones that others there share."""
        kept = {record.key(spec.name, frozen=spec.frozen) for record in self._index.records for spec in record.manifest}
        keys = {record.key(spec.name, frozen=spec.frozen) for record in withdrawn for spec in record.manifest}
        try:
            store = await self._index.get_store()
            await asyncio.gather(*map(store.delete, keys - kept))
        except Exception as error:  # Monarch's own types if TorchStore is dead
            raise WeightsError(f"versions were not deleted: TorchStore failed: {error}") from error


class StoreFeed:
    """Tensors on their way from TorchStore, in rank 0's event loop, to the thread that loads them."""

    def __init__(self, record: VersionRecord, store: Store) -> None:
        self._record = record
        self._store = store
        self._queue: queue.Queue[NamedTensor | BaseException | None] = queue.Queue(_QUEUED_TENSORS)

    async def fetch(self, done: "asyncio.Future[Any]") -> None:
        """Fetches one tensor after the other into a bounded queue, with None at the end, until `done`."""
        try:
            for spec, checksum in zip(self._record.manifest, self._record.checksums, strict=True):
                await self._put((spec.name, await self._get(spec, checksum)), done)
            await self._put(None, done)
        except Exception as error:  # the thread that waits for the next tensor has to hear of it
            await self._put(error, done)

    def __iter__(self) -> Iterator[NamedTensor]:
        """The fetched tensors, in the thread that loads them. Raises what `fetch` came upon."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    async def _get(self, spec: TensorSpec, checksum: int) -> torch.Tensor:
        record = self._record
        try:
            tensor = await self._store.get(record.key(spec.name, frozen=spec.frozen))
        except Exception as error:  # KeyError, or Monarch's own types if TorchStore is dead
            raise WeightsError(f"TorchStore lost {spec.name!r} of version {record.version}: {error}") from error
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise corrupted(record, spec, f"it is {tuple(tensor.shape)} of {tensor.dtype}")
        found = await asyncio.to_thread(element_sum, tensor)
        if found != checksum:
            raise corrupted(record, spec, f"its checksum is {found} instead of {checksum}")
        return tensor

    async def _put(self, item: NamedTensor | BaseException | None, done: "asyncio.Future[Any]") -> None:
        # Polls, because a thread that gave up will not take anything out of a full queue.
        while not done.done():
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(item)
                return
            await asyncio.sleep(_POLL_S)


class StoreReceiver:
    """Broadcasts what rank 0 fetches."""

    def __init__(self, broadcast: Callable[..., Any]) -> None:
        self._broadcast = broadcast

    def feed(self, record: VersionRecord, store: Store) -> Feed:
        """Fetches the version from `store`."""
        return StoreFeed(record, store)

    def open(self, record: VersionRecord, feed: StoreFeed | None) -> "contextlib.closing[Generator[NamedTensor]]":
        """The tensors, one after the other, on every rank. Leaving early still brings the broadcasts to their end."""
        del record
        return contextlib.closing(self._send(feed) if feed is not None else self._receive())

    def _send(self, feed: StoreFeed) -> Generator[NamedTensor]:
        try:
            for item in feed:
                self._broadcast(item)
                yield item
        finally:
            self._broadcast(None)

    def _receive(self) -> Generator[NamedTensor]:
        item = self._broadcast()
        try:
            while item is not None:
                yield item
                item = self._broadcast()
        finally:
            while item is not None:
                item = self._broadcast()
