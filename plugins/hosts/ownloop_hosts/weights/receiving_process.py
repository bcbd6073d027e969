"""The receiving process of a generator host: it owns the shared memory that the host's generators read.

    rank 0 of the trainer: begin   -> locks the buffer that does not hold the newest version
    ranks of the trainer:  links   -> a thread for each link writes what arrives into the buffer
                                      another one passes the same bytes on to the next host, if there is one
    rank 0 of the trainer: finish  -> waits for the end of all links, checks and seals: generators can read the version

The trainer sends to one host and every host to the next, so the trainer sends every byte once. A version is visible
when it is complete here, even if the next host fails. If a transfer breaks off, generators keep the version before.

Every generator host has one receiving process. The controller starts it and writes the directory in the store; rank 0
of the trainer reads the directory before every push, so a process that was replaced takes part from the next push on.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar, TypeVarTuple

import torch

from ownloop_hosts.weights.changes import apply_changes
from ownloop_hosts.weights.links import END, ID_BYTES, LINK_TIMEOUT_S, Link, LinkAddress, LinkError, Part, bytes_of
from rl.system.hardware import available_memory_bytes
from rl.weights.memory import BufferLocation, WeightBuffer, short_of_memory
from rl.weights.version import VersionRecord, WeightsError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Call(Protocol):
    """Calls a method of a host's receiving process."""

    async def __call__(self, method: Callable[["ReceivingProcess", *Ts], T], *arguments: *Ts) -> T:
        """The method's result. Raises its exceptions, and `WeightsError` if the process is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingHost:
    """An entry of the directory at `rl.weights.store.RECEIVERS_KEY`, which is a tuple of them."""

    name: str
    """The name of the host in errors and warnings."""
    identity: str
    """The `host_identity()` of the host."""
    links: LinkAddress
    """At which trainer ranks and other generator hosts reach it."""
    process: str
    """Differs from that of every earlier process on this host."""
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one receiving process has to do with one push."""

    id: str
    record: VersionRecord
    """Without a location."""
    publisher: str
    """The trainer. Versions of the same policy by another trainer are freed."""
    keep: BufferLocation | None
    """Where the newest published version lies on this host, which must not be overwritten."""
    reader_timeout_s: float
    next_host: LinkAddress | None
    """Where every link is passed on to."""
    changes: bool = False
    """Whether messages may hold only what changed since the version at `keep`."""
    link: type[Link] = Link
    """The kind of all links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A version that is complete on a host."""

    location: BufferLocation
    checksums: tuple[int, ...]
    unchanged: bool
    """Whether every byte is that of the version that this host had before."""


class ReceivingProcess:
    """What a trainer can ask of a receiving process. One transfer is under way at a time."""

    def __init__(self, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        """Accepts links at `port`, on all interfaces."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128)
        self.port: int = self._server.getsockname()[1]
        self.link_timeout_s = link_timeout_s
        self._policies: dict[str | None, _PolicyMemory] = {}
        self._incoming: _Incoming | None = None
        self._one_at_a_time = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def ping(self) -> None:
        """Returns if the process runs."""

    def check_room(self, size_bytes: int, publisher: str) -> None:
        """Raises `WeightsError` if the host has less memory than this, with that of other trainers' versions."""
        with self._one_at_a_time:
            others = [memory.num_bytes for memory in self._policies.values() if memory.publisher != publisher]
        if size_bytes > available_memory_bytes() + sum(others):
            raise short_of_memory(size_bytes)

    def begin(self, transfer: Transfer) -> None:
        """Locks a buffer against readers and expects links. Raises `WeightsError`."""
        with self._one_at_a_time:
            self._break_off()
            transfer.link.expect()
            memory = self._memory(transfer.record, transfer.publisher)
            known = memory.newest if transfer.changes else None
            if transfer.changes and (known is None or known.location != transfer.keep):
                raise WeightsError("the version whose changes are to come is not here")
            buffer = memory.other_than(transfer.keep)
            buffer.begin_write(transfer.reader_timeout_s)
            self._incoming = _Incoming(transfer, buffer, known)

    def finish(self, transfer_id: str, num_links: int) -> Received:
        """Waits until everything has arrived, and makes the version visible. Raises `WeightsError`.

        `num_links` is how many links the trainer's ranks made.
        """
        incoming = self._incoming
        try:
            if incoming is None or incoming.transfer.id != transfer_id:
                raise WeightsError("the transfer is no longer under way: another one took its place")
            incoming.wait(num_links, self.link_timeout_s)
            with self._one_at_a_time:
                if self._incoming is not incoming:
                    raise WeightsError("the transfer was broken off")
                return self._seal(incoming)
        except BaseException:
            self.abandon(transfer_id)
            raise

    def abandon(self, transfer_id: str) -> None:
        """Ends a transfer, and the links it uses. A buffer that was not sealed holds no version."""
        with self._one_at_a_time:
            if self._incoming is not None and self._incoming.transfer.id == transfer_id:
                self._break_off()

    def drop(self, policy: str | None, publisher: str) -> None:
        """Frees a policy's memory."""
        with self._one_at_a_time:
            if policy in self._policies and self._policies[policy].publisher == publisher:
                if self._incoming is not None and self._incoming.transfer.record.policy == policy:
                    self._break_off()
                self._policies.pop(policy).close()

    def close(self) -> None:
        """Ends every link and frees all memory."""
        with self._one_at_a_time:
            self._closed = True
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._server.close()
            self._break_off()
            for memory in self._policies.values():
                memory.close()
            self._policies.clear()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or too many files are open
                time.sleep(0.1)
            else:
                threading.Thread(target=self._receive, args=(connection,), daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        with closing(Link(connection, self.link_timeout_s)) as link:
            try:
                transfer_id = link.receive_bytes(ID_BYTES).decode("ascii", "replace")
            except LinkError:
                return
            with self._one_at_a_time:
                incoming = self._incoming
            if incoming is not None and incoming.transfer.id == transfer_id:
                incoming.receive(link)

    def _memory(self, record: VersionRecord, publisher: str) -> "_PolicyMemory":
        memory = self._policies.get(record.policy)
        # A trainer that was restarted numbers its versions anew.
        if memory is None or (memory.layout, memory.publisher) != (record.manifest.layout, publisher):
            if memory is not None:
                self._policies.pop(record.policy).close()
            memory = self._policies[record.policy] = _PolicyMemory(record, publisher)
        return memory

    def _seal(self, incoming: "_Incoming") -> Received:
        record, buffer = incoming.transfer.record, incoming.buffer
        buffer.seal(record)
        incoming.sealed = True
        memory = self._policies[record.policy]
        before, memory.newest = memory.newest, buffer
        unchanged = buffer.is_unchanged(record, before)
        return Received(location=buffer.location, checksums=buffer.sealed, unchanged=unchanged)

    def _break_off(self) -> None:
        """Ends the last transfer, if that has not ended."""
        if self._incoming is not None:
            self._incoming.break_off()
            self._incoming = None


class _PolicyMemory:
    """The buffers of one policy's versions."""

    def __init__(self, record: VersionRecord, publisher: str) -> None:
        self.layout = record.manifest.layout
        self.publisher = publisher
        self.newest: WeightBuffer | None = None
        self._buffers = WeightBuffer.create_for(record.manifest)
        for buffer in self._buffers:
            buffer.pin()

    @property
    def num_bytes(self) -> int:
        """The bytes that the buffers take."""
        return sum(buffer.parts[0].nbytes for buffer in self._buffers)

    def other_than(self, keep: BufferLocation | None) -> WeightBuffer:
        """A buffer that may be overwritten."""
        return next(buffer for buffer in self._buffers if buffer.location != keep)

    def close(self) -> None:
        """Lets go of the buffers. A reader keeps its own hold on the one that it is reading."""
        for buffer in self._buffers:
            buffer.close()


class _Incoming:
    """A transfer that is under way."""

    def __init__(self, transfer: Transfer, buffer: WeightBuffer, known: WeightBuffer | None) -> None:
        """`known` has the version whose changes arrive in `buffer`, if only changes do."""
        self.transfer = transfer
        self.buffer = buffer
        self.sealed = False
        self._known = known
        self._manifest = transfer.record.manifest
        self._ends: SimpleQueue[Counter[int] | Exception] = SimpleQueue()  # bytes of each tensor that a link brought
        self._lock = threading.Lock()  # of all below
        self._links: list[Link] = []
        self._receiving: list[threading.Thread] = []
        self._is_over = False

    def receive(self, link: Link) -> None:
        """Receives what arrives on a link, until its end."""
        arrived: Counter[int] = Counter()
        onward = self._forwarding()
        try:
            self._hold(link, threading.current_thread())
            with closing(self.transfer.link.accept(link)) as link:
                self._hold(link)
                while (head := link.receive_head()) is not None:
                    part, num_bytes, described = head
                    data = self._receive_part(link, part, num_bytes)
                    arrived[part.tensor] += part.nbytes(self._manifest)
                    onward(described)
                    onward(data)
            onward(END)
        except Exception as error:  # `wait` raises it
            self._ends.put(error)
        else:
            self._ends.put(arrived)
        onward(None)

    def wait(self, num_links: int, timeout_s: float) -> None:
        """Waits until everything has arrived. Raises `WeightsError` if it does not."""
        arrived: Counter[int] = Counter()
        for _ in range(num_links):
            arrived += self._next_end(num_links, timeout_s)
        # A part that no rank sends would silently keep the bytes of an older version.
        for index, spec in enumerate(self._manifest):
            if arrived[index] != spec.nbytes:
                raise WeightsError(
                    f"{spec.name!r}: the ranks' shards hold {arrived[index]} bytes; the tensor has {spec.nbytes}, each"
                    " of which one rank has to send"
                )

    def break_off(self) -> None:
        """Ends the threads that receive, and what is passed on. The buffer holds no version unless it was sealed."""
        with self._lock:
            self._is_over = True
            for link in self._links:
                link.interrupt()
        self._ends.put(LinkError("the transfer was broken off"))
        for thread in self._receiving:
            thread.join()
        if not self.sealed:
            self.buffer.abandon_write()

    def _hold(self, link: Link, receiving: threading.Thread | None = None) -> None:
        with self._lock:
            if self._is_over:
                raise LinkError("the transfer was broken off")
            self._links.append(link)
            self._receiving += [] if receiving is None else [receiving]

    def _next_end(self, num_links: int, timeout_s: float) -> Counter[int]:
        while True:  # a link that is held ends by its own limit
            try:
                end = self._ends.get(timeout=timeout_s)
            except Empty:
                if len(self._receiving) < num_links:
                    raise LinkError(f"receiving weights: no link was made within {timeout_s:g} s") from None
            else:
                if isinstance(end, Exception):
                    raise end
                return end

    def _receive_part(self, link: Link, part: Part, num_bytes: int) -> torch.Tensor:
        """Brings a part, or what changed in it, into its place. Returns the bytes that arrived (uint8 [num_bytes])."""
        place = self._place(self.buffer, part)
        values = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
        data = bytes_of(values)
        if num_bytes == len(data):
            arrived = data
        elif self._known is None or num_bytes > len(data):
            raise LinkError(f"receiving weights: a message has {num_bytes} bytes in place of {len(data)}")
        else:
            arrived = torch.empty(num_bytes, dtype=torch.uint8)
        link.receive_data(arrived)
        if arrived is not data and self._known is not None:
            values.copy_(self._place(self._known, part))
            if num_bytes > 0:
                apply_changes(arrived, data)
        if values is not place:
            place.copy_(values)
        return arrived

    def _place(self, buffer: WeightBuffer, part: Part) -> torch.Tensor:
        return buffer.tensor(self._manifest[part.tensor])[part.slices]

    def _forwarding(self) -> Callable[[bytes | torch.Tensor | None], None]:
        """Takes what is sent to the next host, if there is one, in a thread of its own. None comes last."""
        address, onward = self.transfer.next_host, SimpleQueue[bytes | torch.Tensor | None]()
        if address is None:
            return lambda _: None

        def forward() -> None:
            try:  # the next host expects a link, because every host does before the trainer connects
                with closing(self.transfer.link.connect(address, self.transfer.id)) as link:
                    self._hold(link)
                    while (data := onward.get()) is not None:
                        link.send(data) if isinstance(data, bytes) else link.send_data(data)
            except LinkError as error:  # the next host names what is missing
                print(f"weights were not passed on to {address.host}: {error}", flush=True)

        threading.Thread(target=forward, daemon=True).start()
        return onward.put
