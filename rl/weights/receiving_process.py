"""The receiving process of a generator host: it owns the shared memory that the host's generators read.

What arrives goes into the buffer that does not hold the newest version, and on to the next host message by message. A
version is visible when it is complete here, whatever happens on the next host. If a transfer breaks off, generators
keep the version before.
"""

import asyncio
import threading

import torch

from rl.system.hardware import available_memory_bytes
from rl.weights.buffer import BufferLocation, WeightBuffer, short_of_memory
from rl.weights.links import LINK_TIMEOUT_S, Link, LinkAddress, Rendezvous, connect
from rl.weights.message_streams import Progress, receive_messages, room_to_send, send_messages
from rl.weights.messages import Part, plan_messages
from rl.weights.receivers import Received, Transfer, decode_shards
from rl.weights.versions import Manifest, VersionRecord, WeightsError, corrupted, element_sum


class ReceivingProcess:
    """Implements `Control`. One transfer is under way at a time."""

    def __init__(self, link_timeout_s: float = LINK_TIMEOUT_S) -> None:
        """Listens for links at `port`."""
        self._rendezvous = Rendezvous(link_timeout_s)
        self.port = self._rendezvous.port
        self.link_timeout_s = link_timeout_s
        self._policies: dict[str | None, _PolicyMemory] = {}
        self._incoming: _Incoming | None = None
        self._one_at_a_time = threading.Lock()

    async def ping(self) -> None:
        """Returns."""

    async def check_room(self, size_bytes: int, publisher: str) -> None:
        """See `Control.check_room`."""
        await asyncio.to_thread(self._check_room, size_bytes, publisher)

    async def begin(self, transfer: Transfer) -> None:
        """See `Control.begin`."""
        await asyncio.to_thread(self._begin, transfer)

    async def finish(self, transfer_id: str, element_sums: tuple[int, ...] | None) -> Received:
        """See `Control.finish`."""
        return await asyncio.to_thread(self._finish, transfer_id, element_sums)

    async def give_up_next(self, transfer_id: str) -> None:
        """See `Control.give_up_next`."""
        incoming = self._incoming
        if incoming is not None and incoming.transfer.id == transfer_id:
            incoming.give_up_next()

    async def abandon(self, transfer_id: str) -> None:
        """See `Control.abandon`."""
        await asyncio.to_thread(self._abandon, transfer_id)

    async def drop(self, policy: str | None, publisher: str) -> None:
        """See `Control.drop`."""
        await asyncio.to_thread(self._drop, policy, publisher)

    def close(self) -> None:
        """Ends every link and frees all memory."""
        with self._one_at_a_time:
            self._break_off()
            for memory in self._policies.values():
                memory.close()
            self._policies.clear()

    def _check_room(self, size_bytes: int, publisher: str) -> None:
        with self._one_at_a_time:
            others = [memory.num_bytes for memory in self._policies.values() if memory.publisher != publisher]
        if size_bytes > available_memory_bytes() + sum(others):
            raise short_of_memory(size_bytes)

    def _memory(self, record: VersionRecord, publisher: str) -> "_PolicyMemory":
        memory = self._policies.get(record.policy)
        # A trainer that was restarted numbers its versions anew.
        if memory is None or (memory.layout, memory.publisher) != (record.layout, publisher):
            if memory is not None:
                self._policies.pop(record.policy).close()
            memory = self._policies[record.policy] = _PolicyMemory(record, publisher)
        return memory

    def _begin(self, transfer: Transfer) -> None:
        with self._one_at_a_time:
            self._break_off()
            memory = self._memory(transfer.record, transfer.publisher)
            buffer = memory.other_than(transfer.keep)
            buffer.begin_write(transfer.reader_timeout_s)
            memory.close_unused(transfer)
            self._incoming = _Incoming(transfer, buffer, memory, self._rendezvous)

    def _finish(self, transfer_id: str, element_sums: tuple[int, ...] | None) -> Received:
        incoming = self._find(transfer_id)
        try:
            received = incoming.finish(element_sums)
        except BaseException:
            self._abandon(transfer_id)
            raise
        with self._one_at_a_time:
            if self._incoming is incoming:
                self._incoming = None
        return received

    def _find(self, transfer_id: str) -> "_Incoming":
        with self._one_at_a_time:
            if self._incoming is None or self._incoming.transfer.id != transfer_id:
                raise WeightsError("the transfer is no longer under way: another one took its place")
            return self._incoming

    def _abandon(self, transfer_id: str) -> None:
        with self._one_at_a_time:
            if self._incoming is not None and self._incoming.transfer.id == transfer_id:
                self._break_off()
            for memory in self._policies.values():
                if memory.transfer_id == transfer_id:
                    memory.close_links()

    def _drop(self, policy: str | None, publisher: str) -> None:
        with self._one_at_a_time:
            if policy in self._policies and self._policies[policy].publisher == publisher:
                if self._incoming is not None and self._incoming.transfer.record.policy == policy:
                    self._break_off()
                self._policies.pop(policy).close()

    def _break_off(self) -> None:
        """Ends a transfer that nobody finished."""
        if self._incoming is not None:
            self._incoming.break_off()
            self._incoming = None


class _PolicyMemory:
    """The buffers of one policy's versions, and the links on which they arrive."""

    def __init__(self, record: VersionRecord, publisher: str) -> None:
        self.layout = record.layout
        self.publisher = publisher
        self.buffers = WeightBuffer.create_for(record.manifest)
        self.newest: tuple[WeightBuffer, tuple[int, ...]] | None = None
        self.transfer_id = ""  # that used the links last
        self.incoming: dict[LinkAddress, Link] = {}
        self.outgoing: dict[LinkAddress, Link] = {}  # one at most

    @property
    def num_bytes(self) -> int:
        """What the buffers take."""
        return sum(buffer.data.nbytes for buffer in self.buffers)

    def other_than(self, keep: BufferLocation | None) -> WeightBuffer:
        """A buffer that may be overwritten."""
        return next(buffer for buffer in self.buffers if buffer.location != keep)

    def close_unused(self, transfer: Transfer) -> None:
        """Closes the links that this transfer does not use."""
        self.transfer_id = transfer.id
        wanted = {address for _, address in transfer.incoming}
        for links, kept in ((self.incoming, wanted), (self.outgoing, {transfer.outgoing})):
            for address in [address for address in links if address not in kept]:
                links.pop(address).close()

    def close_links(self) -> None:
        """Ends every link."""
        for links in (self.incoming, self.outgoing):
            while links:
                links.popitem()[1].close()

    def close(self) -> None:
        """Lets go of everything. A reader keeps its own hold on the buffer that it is reading."""
        self.close_links()
        for buffer in self.buffers:
            buffer.close()


class _Incoming:
    """A transfer that is under way, in threads of its own: one receives, and one passes on."""

    def __init__(self, transfer: Transfer, buffer: WeightBuffer, memory: _PolicyMemory, rendezvous: Rendezvous) -> None:
        self.transfer = transfer
        self._buffer = buffer
        self._memory = memory
        self._rendezvous = rendezvous
        self._manifest: Manifest = transfer.record.manifest
        self._messages = plan_messages(self._manifest, decode_shards(transfer.shards))
        self._progress = Progress()
        self._problem: Exception | None = None
        self._not_forwarded: str | None = None
        self._forwarding_ended = threading.Event()
        self._threads = [threading.Thread(target=self._receive, daemon=True)]
        if transfer.outgoing is None:
            self._forwarding_ended.set()
        else:
            self._threads.append(threading.Thread(target=self._forward, daemon=True))
        for thread in self._threads:
            thread.start()

    def finish(self, element_sums: tuple[int, ...] | None) -> Received:
        """Waits for the threads, and seals the buffer. Raises `WeightsError`."""
        self._threads[0].join()
        if self._problem is not None:
            raise self._problem
        record, before = self.transfer.record, self._memory.newest
        if element_sums is not None:
            self._check(element_sums)
        checksums = self._buffer.checksums(record)
        self._buffer.seal(record, checksums)
        self._memory.newest = (self._buffer, checksums)
        unchanged = before is not None and before[1] == checksums and self._same_as(before[0])
        self._forwarding_ended.wait()
        return Received(
            location=self._buffer.location,
            checksums=checksums,
            unchanged=unchanged,
            not_forwarded=self._not_forwarded,
        )

    def give_up_next(self) -> None:
        """Ends the wait for the next host."""
        self._not_forwarded = self._not_forwarded or "it is gone"
        self._forwarding_ended.set()

    def break_off(self) -> None:
        """Ends the threads. The buffer holds no version afterwards."""
        self._memory.close_links()
        for thread in self._threads:
            thread.join()
        self._memory.close_links()  # those that a thread has made meanwhile
        self._buffer.abandon_write()

    def _receive(self) -> None:
        known = self._memory.incoming
        try:
            for _, address in self.transfer.incoming:
                if address not in known:
                    known[address] = self._rendezvous.accept(address)
            links = {sender: known[address] for sender, address in self.transfer.incoming}
            receive_messages(links, self._messages, self._manifest, self._buffer, self._progress)
        except Exception as error:  # `finish` raises it
            self._problem = error
        self._progress.end()

    def _forward(self) -> None:
        address, known = self.transfer.outgoing, self._memory.outgoing
        assert address is not None
        try:
            link = known.get(address) or connect(address)
            known[address] = link
            room = room_to_send(self._messages)
            send_messages(link, self._messages, self._manifest, self._value, room, self._progress)
        except Exception as error:  # the version may still be complete here
            self._not_forwarded = str(error)
        self._forwarding_ended.set()

    def _value(self, part: Part) -> torch.Tensor:
        return self._buffer.tensor(self._manifest[part.tensor])[part.slices]

    def _check(self, element_sums: tuple[int, ...]) -> None:
        for spec, expected in zip(self._manifest, element_sums, strict=True):
            if (found := element_sum(self._buffer.tensor(spec))) != expected:
                what = f"the sum of its bits is {found} instead of {expected}"
                raise corrupted(self.transfer.record, spec, what)

    def _same_as(self, before: WeightBuffer) -> bool:
        """Whether the version before, with equal checksums, is in its buffer still and has the same bytes."""
        record = self.transfer.record
        if before is self._buffer:
            return False
        return record.full_checksums or self._buffer.holds_same_as(before, record.manifest)
