"""Rank 0's part in a push over the network: which hosts it goes to, in which order, and what came of it.

A transfer goes through all hosts, one after the other. Those that it did not reach get a second transfer without those
that do not answer any more. The push fails if no host has the version in the end; otherwise it warns of the hosts that
lack it, whose generators cannot pull it, and tries them again at the next push.
"""

import asyncio
import os
import time
import uuid
import warnings
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace

from rl.system.hardware import host_identity
from rl.weights.buffer import BufferLocation
from rl.weights.links import LinkAddress, rank_link, resolve
from rl.weights.messages import Part
from rl.weights.receivers import Directory, Received, ReceivingHost, Transfer, encode_shards
from rl.weights.versions import LIVING_VERSIONS, VersionIndex, VersionRecord, WeightsError, buffer_size

_MAX_TRANSFERS = 2  # of one push
ALIVE_S = 5.0  # for an answer that costs no work
REPLACED_S = 15.0  # within which the controller replaces receiving processes that have died
LOOK_S = 1.0
_BYTES_PER_S = 50e6  # that a host checks or passes on at least, once the trainer has sent everything


class PushDirector:
    """Directs the pushes of one policy."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float) -> None:
        """A host waits at most `reader_timeout_s` for readers of the version that is replaced."""
        self._index = index
        self._reader_timeout_s = reader_timeout_s
        self._publisher = f"{host_identity()}/{os.getpid()}"
        self._record: VersionRecord | None = None
        self._published: VersionRecord | None = None
        self._shards = b""
        self._senders: tuple[int, ...] = ()
        self._hosts: tuple[ReceivingHost, ...] | None = None  # None before a push has read the directory
        self._directory = Directory(index.get_store)
        self._suspects: set[str] = set()  # processes that failed, and have to answer before they are sent anything
        self._transfers = 0
        self._has_waited = False
        self._chain: tuple[ReceivingHost, ...] = ()
        self._linked: tuple[tuple[str, ...], tuple[int, ...]] | None = None  # for which the links were made
        self._addresses: list[LinkAddress] = []
        self._id = ""
        # As many as the index keeps: those of the versions that can still be pulled.
        self._introduced: deque[frozenset[tuple[str, BufferLocation]]] = deque(maxlen=LIVING_VERSIONS)
        self._reached: dict[str, Received] = {}  # by the host's identity, and so are the next two
        self._refused: dict[str, None] = {}
        self._reasons: dict[str, str] = {}
        self.broken = False
        """Whether the last transfer left links that cannot be used again."""
        self.unchanged = False
        """Whether the last version has every byte of the one before, on the first host that got it."""

    async def check_room(self, size_bytes: int) -> None:
        """Raises `WeightsError` if there is no host, or if one has too little memory for versions of this size."""
        hosts = await self._directory.read()
        if not hosts:
            raise WeightsError("no generator host receives weights over the network")
        checks = [host.control.check_room(LIVING_VERSIONS * size_bytes, self._publisher) for host in hosts]
        for host, outcome in zip(hosts, await _outcomes(checks, ALIVE_S), strict=True):
            if isinstance(outcome, Exception):
                raise WeightsError(f"generator host {host.name}: {outcome}") from outcome

    def start(self, record: VersionRecord, shards: Sequence[Sequence[Part]]) -> None:
        """Begins a push."""
        self._record = record
        self._shards = encode_shards(shards)
        self._senders = tuple(rank for rank, parts in enumerate(shards) if parts)
        self._hosts, self._transfers, self._has_waited = None, 0, False
        self._reached, self._refused, self._reasons = {}, {}, {}

    async def next_route(self) -> LinkAddress | None:
        """Where the next transfer begins, once its hosts expect it; None if none is needed, or none would help.

        Every sending rank connects there, to a link of this name with its rank behind it.
        """
        try:
            if self._hosts is None:
                self._hosts = ()
                self._hosts = await self._directory.read()
            while self._transfers < _MAX_TRANSFERS or await self._replaced():
                left = [host for host in self._hosts if host.identity not in self._reached | self._refused]
                self._chain = tuple(await self._answering(left))
                if not self._chain:
                    if not await self._replaced():
                        break
                    continue
                ips = [resolve(host.address, host.port) for host in self._chain]
                self._name_links(ips)
                if await self._begin():
                    self._transfers += 1
                    return self._addresses[0]
        except WeightsError as error:
            self._reasons[""] = str(error)
        return None

    async def _replaced(self) -> bool:
        """Waits for the successor of a dead receiving process, once, if no other host has the version."""
        before = self._hosts or ()
        if self._reached or self._has_waited:
            return False
        answers = await _outcomes([host.control.ping() for host in before], ALIVE_S)
        if not any(isinstance(answer, Exception) for answer in answers):
            return False
        self._has_waited = True
        end = time.monotonic() + REPLACED_S
        while time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
            hosts = await self._directory.read()
            if {host.process for host in hosts} - {host.process for host in before}:
                self._hosts, self._transfers, self._refused = hosts, 0, {}
                return True
        return False

    async def _begin(self) -> bool:
        """Tells every host of the route what will come. Returns whether all of them can take it."""
        assert self._record is not None
        self._id = uuid.uuid4().hex
        begins: list[Awaitable[object]] = []
        for position, host in enumerate(self._chain):
            own, others = self._addresses[position], self._addresses[position + 1 :]
            transfer = Transfer(
                id=self._id,
                record=self._record,
                publisher=self._publisher,
                shards=self._shards,
                keep=None if self._published is None else self._published.location.get(host.identity),
                reader_timeout_s=self._reader_timeout_s,
                incoming=tuple((rank, rank_link(own, rank) if position == 0 else own) for rank in self._senders),
                outgoing=others[0] if others else None,
            )
            begins.append(self._directory.while_listed(host, host.control.begin(transfer)))
        outcomes = await _outcomes(begins, self._reader_timeout_s + 2 * self._idle_s)
        self._note(outcomes)
        refused = {h.identity for h, outcome in zip(self._chain, outcomes, strict=True) if outcome is not None}
        self._refused |= dict.fromkeys(refused)
        if refused:
            await self._abandon()
        return not refused

    async def finish(self, problem: str | None, element_sums: tuple[int, ...] | None) -> None:
        """Asks every host for the outcome. `problem` is that of the ranks that sent."""
        assert self._record is not None
        if problem is not None:
            for host in self._chain:
                self._reasons.setdefault(host.identity, problem)
            self._suspects |= {host.process for host in self._chain}
            await self._abandon()
            return
        outcomes = await self._finish_all(element_sums)
        self._note(outcomes)
        received = [outcome for outcome in outcomes if isinstance(outcome, Received)]
        self.broken = len(received) < len(self._chain) or any(each.not_forwarded is not None for each in received)
        for host, outcome in zip(self._chain, outcomes, strict=True):
            if isinstance(outcome, Received):
                self._reached[host.identity] = outcome
        if self.broken:
            await self._abandon()

    async def _finish_all(self, element_sums: tuple[int, ...] | None) -> list[object]:
        """What every host of the route answers. After the first failure, the others have a few seconds left."""
        assert self._record is not None
        failed = asyncio.Event()
        limit_s = self._idle_s + buffer_size(self._record.manifest) / _BYTES_PER_S

        async def one(position: int) -> object:
            host = self._chain[position]
            finish = self._directory.while_listed(host, host.control.finish(self._id, element_sums))
            asked = asyncio.ensure_future(_outcome(finish, limit_s))
            others = asyncio.ensure_future(failed.wait())
            await asyncio.wait((asked, others), return_when=asyncio.FIRST_COMPLETED)
            others.cancel()
            outcome = await _outcome(asked, ALIVE_S)
            if not isinstance(outcome, Received) or outcome.not_forwarded is not None:
                failed.set()
            if not isinstance(outcome, Received) and position > 0:
                await _outcome(self._chain[position - 1].control.give_up_next(self._id), ALIVE_S)
            return outcome

        return list(await asyncio.gather(*map(one, range(len(self._chain)))))

    async def publish(self) -> tuple[VersionRecord, tuple[int, ...]]:
        """Enters the version into the index. Returns its record and checksums. Raises `WeightsError`."""
        assert self._record is not None
        assert self._hosts is not None
        names = {host.identity: host.name for host in self._hosts}
        lost = [f"{names.get(who, 'no host')}: {why}" for who, why in self._reasons.items() if who not in self._reached]
        if not self._reached:
            raise WeightsError(f"version {self._record.version} reached no generator host; {'; '.join(lost)}")
        first = next(iter(self._reached.values()))
        if any(each.checksums != first.checksums for each in self._reached.values()):
            raise WeightsError(f"version {self._record.version} is corrupted: hosts received different bytes")
        locations = {identity: each.location for identity, each in self._reached.items()}
        record = replace(self._record, location=locations)
        await self._introduce(record)
        self._published, self.unchanged = record, first.unchanged
        if lost:
            warnings.warn(
                f"version {record.version} did not reach every generator host, and cannot be pulled there; "
                f"{'; '.join(lost)}",
                stacklevel=2,
            )
        return record, first.checksums

    async def _introduce(self, record: VersionRecord) -> None:
        """Tells TorchStore of buffers. From then on their headers say which version they hold."""
        places = frozenset(record.location.items())
        if places not in self._introduced:
            await self._index.announce(record)
            self._introduced.append(places)

    async def close(self, policies: Iterable[str | None]) -> None:
        """Has every host free the memory of these policies."""
        hosts = self._hosts or ()
        await _outcomes([h.control.drop(policy, self._publisher) for policy in policies for h in hosts], ALIVE_S)

    @property
    def _idle_s(self) -> float:
        """The longest that a link of the route may carry nothing."""
        return max(host.link_timeout_s for host in self._chain)

    def _name_links(self, ips: Sequence[str]) -> None:
        """Keeps the links of the last transfer if they connect the same processes, and names new ones otherwise."""
        connects = tuple(host.process for host in self._chain), self._senders
        if self.broken or connects != self._linked:
            self._linked, self.broken, name = connects, False, uuid.uuid4().hex
            self._addresses = [
                LinkAddress(ip, host.port, f"{name}/{position}", host.link_timeout_s)
                for position, (ip, host) in enumerate(zip(ips, self._chain, strict=True))
            ]

    async def _abandon(self) -> None:
        """Has all hosts end the transfer, and the links that it used."""
        self.broken = True
        await _outcomes([host.control.abandon(self._id) for host in self._chain], ALIVE_S)

    async def _answering(self, hosts: Sequence[ReceivingHost]) -> list[ReceivingHost]:
        """Those that are not suspected, or answer."""
        suspects = [host for host in hosts if host.process in self._suspects]
        outcomes = await _outcomes([host.control.ping() for host in suspects], ALIVE_S)
        answered = {
            host.process for host, outcome in zip(suspects, outcomes, strict=True) if not isinstance(outcome, Exception)
        }
        self._suspects -= answered
        for host in suspects:
            if host.process in self._suspects:
                self._reasons.setdefault(host.identity, f"it does not answer within {ALIVE_S:g} s")
        return [host for host in hosts if host.process not in self._suspects]

    def _note(self, outcomes: Sequence[object]) -> None:
        for host, outcome in zip(self._chain, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self._reasons[host.identity] = str(outcome)
                self._suspects.add(host.process)


async def _outcomes(calls: Sequence[Awaitable[object]], within_s: float) -> list[object]:
    """`_outcome` of each call."""
    return list(await asyncio.gather(*(_outcome(call, within_s) for call in calls)))


async def _outcome(call: Awaitable[object], within_s: float) -> object:
    """A call's result, or its error. A call that takes too long is given up, with an error that says so."""
    try:
        async with asyncio.timeout(within_s):
            return await call
    except TimeoutError:
        return WeightsError(f"it does not answer within {within_s:.0f} s")
    except Exception as error:  # Monarch's own types if the process is gone
        return error
