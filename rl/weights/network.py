"""The transport between hosts: trainer ranks send their shards to the generators' hosts, once for each host.

The trainer's ranks send to one host, and every host passes what arrives on to the next; so the trainer sends every byte
once, however many hosts there are. Each host's receiving process keeps the versions in shared memory, where generators
read them as they would read those of a trainer on their own host.

Rank 0 directs a push; see `network_push.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from rl.system.hardware import host_identity
from rl.weights.buffer import BufferLocation, WeightBuffer, held_version, is_kept
from rl.weights.links import Link, LinkAddress, connect, rank_link
from rl.weights.message_streams import room_to_send, send_messages
from rl.weights.messages import Message, Part, plan_messages, shard_part
from rl.weights.network_push import PushDirector
from rl.weights.ranks import CANNOT_PUBLISH, all_gather, own_rank, raise_on_every_rank
from rl.weights.shared_memory import SharedMemoryReceiver
from rl.weights.transport import Shard
from rl.weights.versions import (
    Manifest,
    Store,
    UnknownVersionError,
    VersionIndex,
    VersionRecord,
    WeightsError,
    add_up,
    buffer_size,
    element_sum,
)

T = TypeVar("T")


class Network:
    """A record's `location` is the `BufferLocation` on each host that has the version, by `host_identity`."""

    fallback_notice = "the network carries the weights"

    def suits(self, *, other_hosts: bool) -> bool:
        """Only if there is a host to send to."""
        return other_hosts

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "NetworkSender":
        del asked  # it needs hosts that receive
        return NetworkSender(index, reader_timeout_s)

    def receiver(self, broadcast: Callable[..., Any]) -> "NetworkReceiver":
        del broadcast  # every rank reads the buffer itself
        return NetworkReceiver()

    def current(self, record: VersionRecord) -> VersionRecord | None:
        """The version that this host has where the record says; None while there is no whole one."""
        location = _location_here(record)
        held = None if location is None else held_version(location)
        return None if held is None else replace(record, push_index=held[0], version=held[1])


class NetworkSender:
    """Casts this rank's shards and sends them to the first host."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float) -> None:
        self._index = index
        self._rank = own_rank()
        self._director = PushDirector(index, reader_timeout_s) if self._rank == 0 else None
        self._manifest: Manifest = ()
        self._tensors: dict[str, int] = {}  # the index of each tensor in the manifest
        self._of_ranks: list[tuple[Part, ...]] = []  # what each rank holds
        self._messages: tuple[Message, ...] = ()
        self._room: list[torch.Tensor] = []
        self._link: tuple[LinkAddress, Link] | None = None

    async def prepare(self, manifest: Manifest) -> None:
        """Raises `WeightsError` on every rank if no host receives, or if one has too little memory."""
        problem: WeightsError | None = None
        if self._director is not None:
            try:
                await self._director.check_room(buffer_size(manifest))
            except WeightsError as error:
                problem = error
        await asyncio.to_thread(raise_on_every_rank, problem, CANNOT_PUBLISH)
        self._manifest = manifest
        self._tensors = {spec.name: tensor for tensor, spec in enumerate(manifest)}

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, tuple[int, ...]]:
        """Sends the shards until every host has the version or has been given up."""
        own = await self._agree(shards)
        if self._director is not None:
            self._director.start(record, self._of_ranks)
        while True:
            address = await _of_rank_0(await self._director.next_route() if self._director is not None else None)
            if address is None:
                break
            await self._attempt(address, own, sums_wanted=record.full_checksums)
        problem: WeightsError | None = None
        result: tuple[VersionRecord, tuple[int, ...]] = record, ()
        if self._director is not None:
            try:
                result = await self._director.publish()
            except WeightsError as error:
                problem = error
        await asyncio.to_thread(raise_on_every_rank, problem, CANNOT_PUBLISH)
        return result

    def holds_same(self, before: VersionRecord, record: VersionRecord) -> bool:
        """What the first host found: it compared every byte with those of the version that it had before."""
        del before, record
        return self._director is not None and self._director.unchanged

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Has every host free its memory."""
        self._close_link()
        if self._director is not None:
            await self._director.close({record.policy for record in withdrawn})

    async def _agree(self, shards: Iterable[Shard]) -> "_OwnShards":
        """Tells the ranks what each holds, and plans the messages if that has changed."""
        problem: Exception | None = None
        own = _OwnShards(self._manifest)
        try:
            for shard in shards:
                if shard.local is not None:
                    own.add(self._tensors[shard.name], shard)
        except ValueError as error:
            problem = error
        await asyncio.to_thread(raise_on_every_rank, problem, CANNOT_PUBLISH)
        known = self._of_ranks[self._rank] if self._of_ranks else None
        changed = await asyncio.to_thread(all_gather, None if own.parts == known else own.parts)
        if any(parts is not None for parts in changed):
            before = self._of_ranks or [()] * len(changed)
            self._of_ranks = [old if new is None else new for old, new in zip(before, changed, strict=True)]
            planned = plan_messages(self._manifest, self._of_ranks)  # raises on every rank alike
            self._messages = tuple(message for message in planned if message.sender == self._rank)
            self._room = room_to_send(self._messages)
        return own

    async def _attempt(self, address: LinkAddress, own: "_OwnShards", *, sums_wanted: bool) -> None:
        """Sends everything once. What came of it, the director knows."""
        sums: dict[int, int] | None = {} if sums_wanted else None
        problem: str | None = None
        try:
            await asyncio.to_thread(self._send, rank_link(address, self._rank), own, sums)
        except Exception as error:  # of any kind, because the other ranks wait to hear of it
            problem = str(error)
        of_ranks = await asyncio.to_thread(all_gather, (problem, sums))
        if self._director is not None:
            found = next((text for text, _ in of_ranks if text is not None), None)
            await self._director.finish(found, self._totals([each for _, each in of_ranks if each is not None]))
        if await _of_rank_0(self._director is not None and self._director.broken):
            self._close_link()

    def _totals(self, sums: Sequence[dict[int, int]]) -> tuple[int, ...] | None:
        """The `element_sum` of every tensor; None if the ranks did not sum."""
        tensors = range(len(self._manifest))
        return tuple(add_up(of_rank.get(i, 0) for of_rank in sums) for i in tensors) if sums else None

    def _send(self, address: LinkAddress, own: "_OwnShards", sums: dict[int, int] | None) -> None:
        if not self._messages:
            return
        if self._link is None or self._link[0] != address:
            self._close_link()
            self._link = address, connect(address)
        send_messages(self._link[1], self._messages, self._manifest, lambda part: own.value(part, sums), self._room)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link[1].close()
            self._link = None


class NetworkReceiver:
    """Reads the shared memory of this host's receiving process."""

    def __init__(self) -> None:
        self._local = SharedMemoryReceiver()

    def feed(self, record: VersionRecord, store: Store) -> None:
        """Nothing has to be fetched."""
        del record, store

    @contextlib.contextmanager
    def open(self, record: VersionRecord, feed: None) -> Generator[WeightBuffer]:
        """The version in this host's memory. Raises `UnknownVersionError` if it did not get here, or is gone."""
        location = _location_here(record)
        if location is None:
            raise UnknownVersionError(
                f"version {record.version} is not on this host: the push did not reach it, or its receiving process"
                " has ended since; the next push brings a newer version"
            )
        with self._local.open(replace(record, location=location, host=host_identity()), feed) as buffer:
            yield buffer


class _OwnShards:
    """What this rank sends of one version."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._shards: dict[int, tuple[Part, torch.Tensor]] = {}

    def add(self, tensor: int, shard: Shard) -> None:
        """Adds what this rank holds of a tensor."""
        assert shard.local is not None
        self._shards[tensor] = shard_part(self._manifest, tensor, shard.region), shard.local

    @property
    def parts(self) -> tuple[Part, ...]:
        """What this rank holds, in the manifest's order."""
        return tuple(self._shards[tensor][0] for tensor in sorted(self._shards))

    def value(self, part: Part, sums: dict[int, int] | None) -> torch.Tensor:
        """The values of a part of a shard. Adds the sum of their bits, as they are sent, to `sums`."""
        whole, local = self._shards[part.tensor]
        if part.region:
            first = whole.region[0][0]
            begin, end = part.region[0]
            local = local[begin - first : end - first]
        if sums is not None:
            local = local.to(self._manifest[part.tensor].dtype)
            sums[part.tensor] = sums.get(part.tensor, 0) + element_sum(local)
        return local


def _location_here(record: VersionRecord) -> BufferLocation | None:
    """Where this host has the version, or an older or a newer one; None if its process is gone."""
    location: BufferLocation | None = record.location.get(host_identity())
    return location if location is not None and is_kept(location) else None


async def _of_rank_0(value: T) -> T:
    """Rank 0's value. A collective."""
    return (await asyncio.to_thread(all_gather, value))[0]
