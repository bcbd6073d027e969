"""TorchStore: the directory of published versions, and the transport between any hosts.

The directory has a record for each place where versions of a policy lie. Some transports overwrite a place without an
entry here, so the transport of a record has the last word on which version lies there now.

As a transport, trainer ranks put their shards, and generators get whole tensors. Rank 0 of a generator gets one tensor
after the other and broadcasts it, so no rank ever holds a second copy of the model for this.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from rl.weights.memory import add_up, element_sum
from rl.weights.version import (
    LIVING_VERSIONS,
    Fetch,
    Manifest,
    Shard,
    TensorSpec,
    Transport,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    corrupted,
    load_transport,
    on_rank_0,
    raise_on_every_rank,
)

RECEIVERS_KEY = "ownloop/weight_receivers"
"""TorchStore key of the other hosts that receive weights, as the plug-in describes them that sends them there."""

INDEX_KEY = "ownloop/weights"
"""TorchStore key of the model's index, a tuple of `VersionRecord`s; see `index_key`."""

NamedTensor = tuple[str, torch.Tensor]

_MAX_PUTS_IN_FLIGHT = 8


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


def index_key(policy: str | None) -> str:
    """TorchStore key of a policy's index, from which `living_versions` reads what can be pulled."""
    return INDEX_KEY if policy is None else f"{INDEX_KEY}/adapters/{policy}"


def tensor_key(record: VersionRecord, spec: TensorSpec) -> str:
    """TorchStore key of one of a version's tensors. Versions with the same `frozen_id` share the frozen ones."""
    push = f"frozen/{record.frozen_id.hex()}" if spec.frozen else f"{record.version}/{record.push_index}"
    return f"{index_key(record.policy)}/{push}/{spec.name}"


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

    async def withdraw(self) -> None:
        """Deletes the index. Raises `WeightsError`."""
        records, self.records = self.records, ()
        if records:
            try:
                await (await self.get_store()).delete(index_key(records[0].policy))
            except Exception as error:  # Monarch's own types if TorchStore is dead
                raise WeightsError(f"versions were not withdrawn: TorchStore failed: {error}") from error


async def receivers_on_hosts(store: Store) -> tuple[Any, ...]:
    """What is at `RECEIVERS_KEY`; empty if no generator is on another host.

    Raises `WeightsError` if TorchStore does not answer.
    """
    return await _found(store, RECEIVERS_KEY, "which generator hosts there are")


async def find_record(store: Store, version: int, policy: str | None = None) -> VersionRecord:
    """The record of a policy's version that can be pulled, the newest if it was published twice.

    Raises `UnknownVersionError`, a ValueError, naming the versions that can be pulled, ValueError if the weights are
    out of reach, and `WeightsError` if TorchStore does not answer or the publisher is gone.
    """
    by_version = {record.version: record for record in await living_versions(store, policy)}
    if version not in by_version:
        living = ", ".join(map(str, sorted(by_version))) or "none; nothing was pushed yet"
        raise UnknownVersionError(f"version {version} cannot be pulled; versions that can: {living}")
    return by_version[version]


async def living_versions(store: Store, policy: str | None = None) -> tuple[VersionRecord, ...]:
    """The records of a policy's versions that can be pulled, oldest first. Raises as `find_record` does."""
    announced: tuple[VersionRecord, ...] = await _found(store, index_key(policy), "which versions there are")
    living = [now for record in announced if (now := load_transport(record.transport).current(record)) is not None]
    return tuple(sorted(living, key=lambda record: record.push_index))


async def _found(store: Store, key: str, what: str) -> tuple[Any, ...]:
    try:
        return await store.get(key)
    except Exception as error:  # Monarch's own types if TorchStore is dead, and KeyError for its faults too
        if isinstance(error, KeyError) and "Unable to locate" in str(error):
            return ()
        raise WeightsError(f"TorchStore did not say {what}: {error}") from error


class StoreTransport(Transport):
    """A record has no `location`: `tensor_key` says where each tensor is.

    A version stays as it is until the index drops it, so a record's version is what can be pulled.
    """

    fallback_notice = "TorchStore carries the weights, which takes tens of times longer"

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "StoreSender":
        del reader_timeout_s, asked  # a version gets keys of its own, so no reader is in the way
        return StoreSender(index)

    def receiver(self, broadcast: Callable[..., Any]) -> "StoreReceiver":
        return StoreReceiver(broadcast)


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
        of_ranks = await asyncio.to_thread(raise_on_every_rank, problem, value=sums)
        self._frozen = {record.frozen_id: {name: each for name, each in sums.items() if self._specs[name].frozen}}
        checksums = tuple(add_up(of_rank.get(spec.name, 0) for of_rank in of_ranks) for spec in record.manifest)
        record = replace(record, checksums=checksums)

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
                value = shard.tensor.detach().to(spec.dtype, copy=True).contiguous()
                if shard.local is not None:
                    sums[shard.name] = element_sum(value.to_local() if isinstance(value, DTensor) else value)
                await store.put(tensor_key(record, spec), value)

        # TorchStore waits for a DTensor's shards from all ranks, replicated ones included.
        mine = [shard for shard in shards if isinstance(shard.tensor, DTensor) or shard.local is not None]
        await asyncio.gather(*(put(each) for each in mine if not (has_frozen and self._specs[each.name].frozen)))
        return sums

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Deletes the tensors of versions that are out of the index, but not frozen ones that others there share."""
        kept = {tensor_key(record, spec) for record in self._index.records for spec in record.manifest}
        keys = {tensor_key(record, spec) for record in withdrawn for spec in record.manifest}
        try:
            store = await self._index.get_store()
            await asyncio.gather(*map(store.delete, keys - kept))
        except Exception as error:  # Monarch's own types if TorchStore is dead
            raise WeightsError(f"versions were not deleted: TorchStore failed: {error}") from error


class StoreReceiver:
    """Broadcasts what rank 0 fetches."""

    def __init__(self, broadcast: Callable[..., Any]) -> None:
        self._broadcast = broadcast

    @contextlib.contextmanager
    def open(self, record: VersionRecord, fetch: Fetch | None) -> Generator[Iterator[NamedTensor]]:
        """The tensors, one after the other, on every rank. Leaving early still brings the broadcasts to their end."""
        if fetch is not None:
            try:
                yield self._sent(record, fetch)
            finally:
                self._broadcast(None)
            return
        received: Iterator[NamedTensor] = iter(self._broadcast, None)
        try:
            yield received
        finally:
            for _ in received:
                pass

    def _sent(self, record: VersionRecord, fetch: Fetch) -> Iterator[NamedTensor]:
        """Checks each tensor while TorchStore brings the next one."""
        keys = iter([tensor_key(record, spec) for spec in record.manifest])
        coming = [fetch(key) for key in itertools.islice(keys, 1)]
        for spec, checksum in zip(record.manifest, record.checksums, strict=True):
            try:
                tensor: torch.Tensor = coming.pop().result()
            except Exception as error:  # KeyError, or Monarch's own types if TorchStore is dead
                raise WeightsError(f"TorchStore lost {spec.name!r} of version {record.version}: {error}") from error
            coming += [fetch(key) for key in itertools.islice(keys, 1)]
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise corrupted(record, spec, f"it is {tuple(tensor.shape)} of {tensor.dtype}")
            if (found := element_sum(tensor)) != checksum:
                raise corrupted(record, spec, f"its checksum is {found} instead of {checksum}")
            self._broadcast((spec.name, tensor))
            yield spec.name, tensor
