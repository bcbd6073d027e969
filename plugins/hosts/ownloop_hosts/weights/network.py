"""The transport between hosts: trainer ranks send their shards to the generators' hosts, once for each host.

    rank 0:    next_route -> begin on every host of a chain, in which each host passes on to the next
    all ranks: links to the first host, side by side; threads cast parts of the shards and send them
    rank 0:    finish -> what every host received; the hosts that lack the version get a second transfer
    rank 0:    the version goes into the index, with its location on every host that has it

Hosts keep the version in shared memory, where generators read it as they would read that of a trainer on their own
host; see `receiving_process`. The push fails if no host has the version in the end. Otherwise it warns of the hosts
that lack it, whose generators cannot pull it, and tries them again at the next push.

Every rank keeps a copy of its last shards. Hosts that have all of that version are sent only its changes: exactly the
pairs of bytes that differ, where these are fewer. In bfloat16, small steps leave most weights as they are. A copy that
saves little is freed.
"""

import asyncio
import contextlib
import os
import time
import uuid
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeVarTuple

from ownloop_hosts.weights.links import Link, OwnShards, Route, Sent
from ownloop_hosts.weights.receiving_process import Received, ReceivingHost, ReceivingProcess, Transfer
from rl.system.hardware import host_identity
from rl.system.ranks import all_gather, own_rank
from rl.weights.memory import BufferLocation, WeightBuffer, held_version, is_kept
from rl.weights.shared_memory import SharedMemoryReceiver
from rl.weights.store import Store, VersionIndex, receivers_on_hosts
from rl.weights.version import (
    LIVING_VERSIONS,
    Fetch,
    Manifest,
    Shard,
    Transport,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    buffer_size,
    on_rank_0,
    raise_on_every_rank,
)

Ts = TypeVarTuple("Ts")

ALIVE_S = 5.0  # for an answer that costs no work
REPLACED_S = 15.0  # within which the controller replaces receiving processes that have died
LOOK_S = 1.0
_MAX_TRANSFERS = 2  # of one push
_BYTES_PER_S = 50e6  # that a host checks or passes on at least, once the trainer has sent everything


class Network(Transport):
    """A record's `location` is the `BufferLocation` on each host that has the version, by `host_identity`."""

    fallback_notice = "the network carries the weights"
    between_hosts = True

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "NetworkSender":
        del asked  # it needs hosts that receive
        return NetworkSender(index, reader_timeout_s)

    def receiver(self, broadcast: Callable[..., object]) -> "NetworkReceiver":
        del broadcast  # every rank reads the buffer itself
        return NetworkReceiver()

    def current(self, record: VersionRecord) -> VersionRecord | None:
        """The version that this host has where the record says; None while there is no whole one."""
        location = _location_here(record)
        return None if location is None else held_version(record, location)


class NetworkSender:
    """Casts this rank's shards and sends them to the first host."""

    link: ClassVar[type[Link]] = Link

    def __init__(self, index: VersionIndex, reader_timeout_s: float) -> None:
        """A host waits at most `reader_timeout_s` for readers of the version that is replaced."""
        self._index = index
        self._reader_timeout_s = reader_timeout_s
        self._rank = own_rank()
        self._publisher = f"{host_identity()}/{os.getpid()}"
        # Rank 0's: its last pushes, and which buffers are in the index, which keeps as many entries.
        self._published: VersionRecord | None = None
        self._hosts: Sequence[ReceivingHost] = ()  # of the last push
        self._have_last: frozenset[str] = frozenset()  # the processes that received all of the last push
        self._shards = OwnShards(self.link)
        self._announced: deque[frozenset[tuple[str, BufferLocation]]] = deque(maxlen=LIVING_VERSIONS)

    async def prepare(self, manifest: Manifest) -> None:
        """Raises `WeightsError` on every rank if no host receives, or if one has too little memory."""
        await on_rank_0(partial(self._check_room, LIVING_VERSIONS * buffer_size(manifest)))

    async def send(self, record: VersionRecord, shards: Iterable[Shard]) -> tuple[VersionRecord, bool]:
        """Sends the shards until every host has the version or has been given up."""
        problem: Exception | None = None
        try:
            self._shards.hold(shards, record.manifest, record.frozen_id)
        except Exception as error:  # of any kind, here and below, because the other ranks wait to hear of it
            problem = error
        await asyncio.to_thread(raise_on_every_rank, problem)
        before = {} if self._published is None else self._published.location
        push = _Push(record, before, self._index.get_store, self._publisher, self._reader_timeout_s, self._have_last)
        push.link = self.link
        push.trusted = self._hosts if self._have_last == frozenset(host.process for host in self._hosts) else ()
        self._have_last = frozenset()
        while (route := await on_rank_0(push.next_route)) is not None:
            try:
                sent = await asyncio.to_thread(self._shards.send, route)
            except Exception as error:
                sent = Sent(problem=str(error))
            await on_rank_0(partial(push.finish, await asyncio.to_thread(all_gather, sent)))
        self._shards.release()
        return await on_rank_0(partial(self._publish, push))

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Has every host free its memory."""
        for policy in {record.policy for record in withdrawn}:
            await _ask_all(self._hosts, ReceivingProcess.drop, policy, self._publisher, get_store=self._index.get_store)

    async def _check_room(self, size_bytes: int) -> None:
        hosts = await receivers_on_hosts(await self._index.get_store())
        if not hosts:
            raise WeightsError("no generator host receives weights over the network")
        asked = ReceivingProcess.check_room, size_bytes, self._publisher
        outcomes = await _ask_all(hosts, *asked, get_store=self._index.get_store)
        for host, outcome in zip(hosts, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise WeightsError(f"generator host {host.name}: {outcome}") from outcome

    async def _publish(self, push: "_Push") -> tuple[VersionRecord, bool]:
        """Enters the version into the index. Returns what `send` does. Raises `WeightsError`."""
        self._hosts = push.hosts
        record, first = push.result()
        self._have_last = frozenset(host.process for host in push.hosts if host.identity in record.location)
        places = frozenset(record.location.items())
        if places not in self._announced:  # the headers of announced buffers say which version they hold
            await self._index.announce(record)
            self._announced.append(places)
        self._published = record
        if push.lost:
            warnings.warn(
                f"version {record.version} did not reach every generator host, and cannot be pulled there; "
                f"{'; '.join(push.lost)}",
                stacklevel=2,
            )
        return record, first.unchanged


class NetworkReceiver(SharedMemoryReceiver):
    """Reads the shared memory of this host's receiving process."""

    @contextlib.contextmanager
    def open(self, record: VersionRecord, fetch: Fetch | None) -> Generator[WeightBuffer]:
        """The version in this host's memory. Raises `UnknownVersionError` if it did not get here, or is gone."""
        location = _location_here(record)
        if location is None:
            raise UnknownVersionError(
                f"version {record.version} is not on this host: the push did not reach it, or its receiving process"
                " has ended since; the next push brings a newer version"
            )
        with super().open(replace(record, location=location, host=host_identity()), fetch) as buffer:
            yield buffer


@dataclass(slots=True)
class _Push:
    """One push, as rank 0 directs it: which hosts it goes to, in which order, and what came of it."""

    record: VersionRecord
    locations: Mapping[str, BufferLocation]
    """Where the version before lies, which hosts keep; by the host's identity, like all maps below."""
    get_store: Callable[[], Awaitable[Store]]
    publisher: str
    reader_timeout_s: float
    have_last: frozenset[str]
    """The receiving processes that have the version that every rank sent last."""
    trusted: Sequence[ReceivingHost] = ()
    """The hosts of the last push, if all of them have it. They begin while the directory is read, which is slower."""
    link: type[Link] = Link
    hosts: Sequence[ReceivingHost] = ()
    _listing: "asyncio.Task[None] | None" = None
    _id: str = ""
    _chain: Sequence[ReceivingHost] = ()
    _num_transfers: int = 0
    _has_waited: bool = False
    _received: dict[str, Received] = field(default_factory=dict[str, Received])
    _refused: set[str] = field(default_factory=set[str])
    _reasons: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def lost(self) -> list[str]:
        """The hosts that lack the version, and why."""
        names = {host.identity: host.name for host in self.hosts}
        return [f"{names.get(w, 'no host')}: {why}" for w, why in self._reasons.items() if w not in self._received]

    def result(self) -> tuple[VersionRecord, Received]:
        """The version's record, and what the first host received. Raises `WeightsError`."""
        if not self._received:
            raise WeightsError(f"version {self.record.version} reached no generator host; {'; '.join(self.lost)}")
        first = next(iter(self._received.values()))
        if any(each.checksums != first.checksums for each in self._received.values()):
            raise WeightsError(f"version {self.record.version} is corrupted: hosts received different bytes")
        locations = {identity: each.location for identity, each in self._received.items()}
        return replace(self.record, location=locations), first

    async def next_route(self) -> Route | None:
        """Where ranks send to hosts that expect it by then; None if no host lacks the version, or none can take it."""
        try:
            self._listing = self._listing or asyncio.create_task(self._list())
            if self.trusted:  # once; if one of them fails or waits, the steps below take longer and say why
                self._chain, self.trusted = self.trusted, ()
                if await self._begin(changes=True, limit_s=ALIVE_S):
                    return Route(self._chain[0].links, self._id, changes=True)
                self._refused, self._reasons = set(), {}
            await self._listing
            while self._num_transfers < _MAX_TRANSFERS or await self._is_replaced():
                left = [host for host in self.hosts if host.identity not in self._received.keys() | self._refused]
                self._chain = await self._alive(left)
                if not self._chain:
                    self._num_transfers = _MAX_TRANSFERS  # only the successor of a dead process can help
                elif await self._begin(changes := self.have_last >= {host.process for host in self._chain}):
                    return Route(self._chain[0].links, self._id, changes)
        except WeightsError as error:
            self._reasons[""] = str(error)
        return None

    async def _list(self) -> None:
        """Reads the directory."""
        self.hosts = self.hosts or await receivers_on_hosts(await self.get_store())

    async def finish(self, sent: Sequence[Sent]) -> None:
        """Asks every host of the chain for its result. `sent` is what every rank has sent."""
        problem = next((each.problem for each in sent if each.problem), None)
        try:
            await (self._listing or self._list())
        except WeightsError as error:
            problem = problem or str(error)
        if problem is None:
            arguments = self._id, sum(each.num_links for each in sent)
            limit_s = self._idle_s + buffer_size(self.record.manifest) / _BYTES_PER_S
            calls = [host.call(ReceivingProcess.finish, *arguments) for host in self._chain]
            # A host that fails keeps the next one waiting.
            outcomes = await outcomes_of(self._chain, calls, self.get_store, limit_s, after_failure_s=ALIVE_S)
            self._succeeded(self._chain, outcomes)
            listed = {host.process for host in self.hosts}  # a process that was replaced meanwhile does not count
            received = [each for each in zip(self._chain, outcomes, strict=True) if each[0].process in listed]
            self._received |= {host.identity: each for host, each in received if isinstance(each, Received)}
        else:
            self._reasons = {host.identity: problem for host in self._chain} | self._reasons
        if any(host.identity not in self._received for host in self._chain):
            await self._abandon()

    async def _begin(self, changes: bool, limit_s: float | None = None) -> bool:
        """Has every host of the chain expect a transfer. Returns whether all of them do."""
        self._id = uuid.uuid4().hex
        begins: list[Awaitable[object]] = []
        for position, host in enumerate(self._chain):
            transfer = Transfer(
                id=self._id,
                record=self.record,
                publisher=self.publisher,
                keep=self.locations.get(host.identity),
                reader_timeout_s=self.reader_timeout_s,
                next_host=self._chain[position + 1].links if position + 1 < len(self._chain) else None,
                changes=changes,
                link=self.link,
            )
            begins.append(host.call(ReceivingProcess.begin, transfer))
        limit_s = limit_s or self.reader_timeout_s + 2 * self._idle_s
        ready = self._succeeded(self._chain, await outcomes_of(self._chain, begins, self.get_store, limit_s))
        if len(ready) == len(self._chain):
            self._num_transfers += 1
            self.have_last = frozenset()  # now each rank has a part of this version in its copy
            return True
        self._refused |= {host.identity for host in self._chain if host not in ready}
        await self._abandon()
        return False

    async def _is_replaced(self) -> bool:
        """Waits for the successor of a dead receiving process, once, if no other host has the version."""
        if self._received or self._has_waited or len(await self._alive(self.hosts)) == len(self.hosts):
            return False
        self._has_waited = True
        before = {host.process for host in self.hosts}
        end = time.monotonic() + REPLACED_S
        while time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
            hosts = await receivers_on_hosts(await self.get_store())
            if {host.process for host in hosts} - before:
                self.hosts, self._num_transfers, self._refused = hosts, 0, set()
                return True
        return False

    async def _abandon(self) -> None:
        """Has all hosts of the chain end the transfer."""
        await _ask_all(self._chain, ReceivingProcess.abandon, self._id, get_store=self.get_store)

    async def _alive(self, hosts: Sequence[ReceivingHost]) -> list[ReceivingHost]:
        """The hosts that answer."""
        return self._succeeded(hosts, await _ask_all(hosts, ReceivingProcess.ping, get_store=self.get_store))

    def _succeeded(self, hosts: Sequence[ReceivingHost], outcomes: Sequence[object]) -> list[ReceivingHost]:
        """The hosts without an error. Keeps the others' errors as the reasons why they lack the version."""
        outcome_of = list(zip(hosts, outcomes, strict=True))
        self._reasons |= {host.identity: str(each) for host, each in outcome_of if isinstance(each, Exception)}
        return [host for host, each in outcome_of if not isinstance(each, Exception)]

    @property
    def _idle_s(self) -> float:
        """The longest that a link of the chain may carry nothing."""
        return max(host.links.timeout_s for host in self._chain)


async def _ask_all(
    hosts: Sequence[ReceivingHost],
    method: Callable[[ReceivingProcess, *Ts], object],
    *arguments: *Ts,
    get_store: Callable[[], Awaitable[Store]],
) -> list[object]:
    """The `outcomes_of` a call to each host that costs little work."""
    return await outcomes_of(hosts, [host.call(method, *arguments) for host in hosts], get_store, ALIVE_S)


async def outcomes_of(
    hosts: Sequence[ReceivingHost],
    calls: Sequence[Awaitable[object]],
    get_store: Callable[[], Awaitable[Store]],
    within_s: float,
    after_failure_s: float = float("inf"),
) -> list[object]:
    """What each call returned, or the error that it raised or that says why it was given up.

    Calls have `within_s`, and `after_failure_s` once another one has failed. A call to a host that the controller has
    taken off the directory is given up: the trainer is not told that a host is lost, and the call would take its limit.
    """
    tasks = {asyncio.ensure_future(call): host for host, call in zip(hosts, calls, strict=True)}
    given_up: dict[asyncio.Future[object], str] = {}
    limit_s, end = within_s, time.monotonic() + within_s
    pending = set(tasks)
    while pending and (left_s := end - time.monotonic()) > 0:
        done, pending = await asyncio.wait(pending, timeout=min(left_s, LOOK_S), return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() is not None for task in done):
            limit_s, end = min((limit_s, end), (after_failure_s, time.monotonic() + after_failure_s))
        elif pending:
            with contextlib.suppress(WeightsError):  # the store may answer later
                listed = {host.process for host in await receivers_on_hosts(await get_store())}
                gone = {task for task in pending if tasks[task].process not in listed}
                given_up |= dict.fromkeys(gone, "it is gone")
                pending -= gone
    given_up |= dict.fromkeys(pending, f"it does not answer within {limit_s:.0f} s")
    for task in given_up:
        task.cancel()
    return [WeightsError(given_up[t]) if t in given_up else t.exception() or t.result() for t in tasks]


def _location_here(record: VersionRecord) -> BufferLocation | None:
    """Where this host has the version, or an older or a newer one; None if its process is gone."""
    location: BufferLocation | None = record.location.get(host_identity())
    return location if location is not None and is_kept(location) else None
