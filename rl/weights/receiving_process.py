"""The receiving process of a generator host: it owns the shared memory that the host's generators read.

    rank 0 of the trainer: begin   -> locks the buffer that does not hold the newest version
    ranks of the trainer:  links   -> a thread for each link writes what arrives into the buffer
                                      another one passes each message on to the next host, if there is one
    rank 0 of the trainer: finish  -> waits for the end of all links, checks and seals: generators can read the version

The trainer sends to one host and every host to the next, so the trainer sends every byte once. A version is visible
when it is complete here, even if the next host fails. If a transfer breaks off, generators keep the version before.

Every generator host has one receiving process. The controller starts it and writes the directory in the store; rank 0
of the trainer reads the directory before every push, so a process that was replaced takes part from the next push on.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar, TypeVarTuple

import torch

from rl.system.hardware import available_memory_bytes
from rl.weights.buffer import BufferLocation, WeightBuffer, short_of_memory
from rl.weights.messages import (
    LINK_TIMEOUT_S,
    Link,
    LinkAddress,
    LinkError,
    Message,
    Part,
    connect,
    receive_message,
    receive_plan,
    send_messages,
)
from rl.weights.versions import Store, VersionRecord, WeightsError, corrupted, element_sum, is_missing

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RECEIVERS_KEY = "ownloop/weight_receivers"
"""TorchStore key of the directory, a tuple of `ReceivingHost`s."""


class Call(Protocol):
    """Calls a method of a host's receiving process."""

    async def __call__(self, method: Callable[["ReceivingProcess", *Ts], T], *arguments: *Ts) -> T:
        """The method's result. Raises its exceptions, and `WeightsError` if the process is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingHost:
    """An entry of the directory."""

    name: str
    """For errors and warnings."""
    identity: str
    """Its `host_identity()`."""
    links: LinkAddress
    """At which trainer ranks and other generator hosts reach it."""
    process: str
    """Differs from that of every earlier process on this host."""
    call: Call


async def receiving_hosts(store: Store) -> tuple[ReceivingHost, ...]:
    """The directory; empty if no generator is on another host. Raises `WeightsError` if the store does not answer."""
    try:
        return await store.get(RECEIVERS_KEY)
    except Exception as error:  # Monarch's own types if TorchStore is dead
        if is_missing(error):
            return ()
        raise WeightsError(f"TorchStore did not say which generator hosts there are: {error}") from error


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
    num_links: int
    """How many links the version arrives on: one from each of the trainer's ranks, through all hosts."""
    next_host: LinkAddress | None
    """Where every link is passed on to."""
    changes: bool = False
    """Whether messages may hold only what changed since the version at `keep`."""


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
            memory = self._memory(transfer.record, transfer.publisher)
            known = memory.newest[0] if transfer.changes and memory.newest is not None else None
            if transfer.changes and (known is None or known.location != transfer.keep):
                raise WeightsError("the version whose changes are to come is not here")
            buffer = memory.other_than(transfer.keep)
            buffer.begin_write(transfer.reader_timeout_s)
            self._incoming = _Incoming(transfer, buffer, known)

    def finish(self, transfer_id: str, element_sums: tuple[int, ...] | None) -> Received:
        """Waits until everything has arrived, and makes the version visible. Raises `WeightsError`.

        `element_sums` has the sums of every tensor, to be compared with the bytes that arrived.
        """
        incoming = self._incoming
        try:
            if incoming is None or incoming.transfer.id != transfer_id:
                raise WeightsError("the transfer is no longer under way: another one took its place")
            incoming.wait(self.link_timeout_s)
            with self._one_at_a_time:
                incoming.check_whole()  # it may have been broken off meanwhile
                return self._seal(incoming, element_sums)
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
                transfer_id = link.receive_id()
            except LinkError:
                return
            with self._one_at_a_time:
                incoming = self._incoming
            if incoming is not None and incoming.transfer.id == transfer_id:
                incoming.receive(link)

    def _memory(self, record: VersionRecord, publisher: str) -> "_PolicyMemory":
        memory = self._policies.get(record.policy)
        # A trainer that was restarted numbers its versions anew.
        if memory is None or (memory.layout, memory.publisher) != (record.layout, publisher):
            if memory is not None:
                self._policies.pop(record.policy).close()
            memory = self._policies[record.policy] = _PolicyMemory(record, publisher)
        return memory

    def _seal(self, incoming: "_Incoming", element_sums: tuple[int, ...] | None) -> Received:
        record, buffer = incoming.transfer.record, incoming.buffer
        if element_sums is not None:
            for spec, expected in zip(record.manifest, element_sums, strict=True):
                if (found := element_sum(buffer.tensor(spec))) != expected:
                    raise corrupted(record, spec, f"the sum of its bits is {found} instead of {expected}")
        checksums = buffer.checksums(record)
        buffer.seal(record, checksums)
        incoming.sealed = True
        memory = self._policies[record.policy]
        before, checksums_before = memory.newest or (buffer, ())
        memory.newest = buffer, checksums
        unchanged = (before is not buffer and checksums == checksums_before) and (
            record.full_checksums or buffer.holds_same_as(before, record.manifest)
        )
        return Received(location=buffer.location, checksums=checksums, unchanged=unchanged)

    def _break_off(self) -> None:
        """Ends the last transfer, if that has not ended."""
        if self._incoming is not None:
            self._incoming.break_off()
            self._incoming = None


class _PolicyMemory:
    """The buffers of one policy's versions."""

    def __init__(self, record: VersionRecord, publisher: str) -> None:
        self.layout = record.layout
        self.publisher = publisher
        self.newest: tuple[WeightBuffer, tuple[int, ...]] | None = None
        self._buffers = WeightBuffer.create_for(record.manifest)

    @property
    def num_bytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.data.nbytes for buffer in self._buffers)

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
        self._known = None if known is None else partial(self._place, known)
        self.sealed = False
        self._manifest = transfer.record.manifest
        self._lock = threading.Lock()  # of all below
        self._links: list[Link] = []
        self._receiving: list[threading.Thread] = []
        self._num_ended = 0
        self._num_bytes = [0] * len(self._manifest)  # of each tensor, that have arrived
        self._problem: Exception | None = None
        self._ended = threading.Event()

    def receive(self, link: Link) -> None:
        """Receives what arrives on a link, until its end."""
        with self._lock:
            self._receiving.append(threading.current_thread())
        arrived: SimpleQueue[bool] = SimpleQueue()  # True for each message; False once no further one comes
        try:
            self._hold(link)
            messages = receive_plan(link)
            if self.transfer.next_host is not None:
                forward = self.transfer.next_host, messages, arrived
                threading.Thread(target=self._forward, args=forward, daemon=True).start()
            for message in messages:
                receive_message(link, message, self._manifest, partial(self._place, self.buffer), self._known)
                with self._lock:
                    for part in message:
                        self._num_bytes[part.tensor] += part.nbytes(self._manifest)
                arrived.put(True)
            link.receive_end()
        except Exception as error:  # `check_whole` raises it
            self._end(error)
        else:
            with self._lock:
                self._num_ended += 1
                is_last = self._num_ended == self.transfer.num_links
            if is_last:
                self._end(None)
        arrived.put(False)

    def wait(self, timeout_s: float) -> None:
        """Waits until everything has arrived. Raises `WeightsError` if it does not."""
        while not self._ended.wait(timeout_s):  # a link that is held ends by its own limit
            if len(self._receiving) < self.transfer.num_links:
                raise LinkError(f"receiving weights: the other end did not connect within {timeout_s:g} s")

    def check_whole(self) -> None:
        """Raises `WeightsError` unless everything has arrived."""
        if self._problem is not None:
            raise self._problem
        # A part that no rank sends would silently keep the bytes of an older version.
        for spec, num_bytes in zip(self._manifest, self._num_bytes, strict=True):
            if num_bytes != spec.nbytes:
                raise WeightsError(
                    f"{spec.name!r}: the ranks' shards hold {num_bytes} bytes; the tensor has {spec.nbytes}, each of"
                    " which one rank has to send"
                )

    def break_off(self) -> None:
        """Ends the threads that receive, and what is passed on. The buffer holds no version unless it was sealed."""
        self._end(LinkError("the transfer was broken off"))
        for thread in self._receiving:
            thread.join()
        if not self.sealed:
            self.buffer.abandon_write()

    def _hold(self, link: Link) -> None:
        with self._lock:
            if self._problem is not None:
                link.interrupt()
            self._links.append(link)

    def _end(self, problem: Exception | None) -> None:
        with self._lock:
            self._problem = self._problem or problem
            if problem is not None:
                for link in self._links:
                    link.interrupt()
        self._ended.set()

    def _place(self, buffer: WeightBuffer, part: Part) -> torch.Tensor:
        return buffer.tensor(self._manifest[part.tensor])[part.slices]

    def _forward(self, address: LinkAddress, messages: Sequence[Message], arrived: "SimpleQueue[bool]") -> None:
        def ready() -> None:
            if not arrived.get():
                arrived.put(False)  # for the messages after this one
                raise LinkError("they did not arrive here")

        try:  # the next host expects a link, because every host does before the trainer connects
            with closing(connect(address, self.transfer.id)) as link:
                self._hold(link)
                values = partial(self._place, self.buffer)
                send_messages(link, messages, self._manifest, values, known=self._known, ready=ready)
        except Exception as error:  # the next host names what is missing
            print(f"weights were not passed on to {address.host}: {error}", flush=True)
