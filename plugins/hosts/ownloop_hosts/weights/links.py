"""Links: how the shards of a trainer rank travel, over TCP connections side by side.

    trainer rank --connect, send_part--> receiving process --the same bytes--> the next host's receiving process

A link brings the id of its transfer and then messages: a head, which names a part of a tensor, and all bytes of the
part or what changed in it. What arrives is never run, but neither end proves who it is and nothing is encrypted: links
are for networks that one trusts.
"""

import json
import math
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch

from ownloop_hosts.weights.changes import changes_of
from rl.system.ranks import num_ranks
from rl.weights.shared_memory import use_one_thread
from rl.weights.version import Manifest, Shard, WeightsError

LINK_TIMEOUT_S = 20.0  # the usual `LinkAddress.timeout_s`: a link survives an interruption of ten seconds

# From all ranks together to the first host, or one from each rank if there are more. One thread copies a few GB/s.
LINKS = min(max(len(os.sched_getaffinity(0)), 2), 16)

PART_BYTES = 2 << 20
"""The most that a message carries: hosts pass a message on while the next one arrives. A single row may be larger."""

_WAKE_BYTES = 256 << 10  # a thread that receives is woken for so many at a time, which a core's cache holds
_TRIED_AGAIN = 20  # pushes after one whose changes were most of all bytes
ID_BYTES = 32  # length of a transfer's id, a `uuid4().hex`

_HEAD = struct.Struct("=IQ")  # length of a part's description, and of its bytes
END = _HEAD.pack(0, 0)  # ends a link that has brought all of its parts


class LinkError(WeightsError):
    """The other end of a link is gone, or does not keep to the protocol."""


class LinkAddress(NamedTuple):
    """Where a receiving process accepts links."""

    host: str
    """A name or an IP address."""
    port: int
    timeout_s: float
    """How long a link may carry nothing, or take to be made."""


class Part(NamedTuple):
    """A rectangular piece of one tensor."""

    tensor: int
    """The tensor's index in the manifest."""
    region: tuple[tuple[int, int], ...]
    """First element and end along each dim; empty for a tensor without dims."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an index of the full tensor."""
        return tuple(slice(*span) for span in self.region)

    def nbytes(self, manifest: Manifest) -> int:
        """Size in bytes."""
        return math.prod(end - begin for begin, end in self.region) * manifest[self.tensor].dtype.itemsize


class Link:
    """One end of a connection. The methods that send and receive raise `LinkError`."""

    part_bytes: ClassVar[int] = PART_BYTES
    carries_changes: ClassVar[bool] = True
    """Whether messages may hold only what changed, which costs a copy of the last version."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """The sending end is made by `connect`."""
        # The kernel's limit, so that one call receives a whole message. With Python's, each piece wakes the thread.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.timeout_s = timeout_s

    @classmethod
    def connect(cls, address: LinkAddress, transfer_id: str) -> Self:
        """The sending end of a link."""
        host, port, timeout_s = address
        try:
            link = cls(socket.create_connection((host, port), timeout_s), timeout_s)
        except OSError as error:
            raise LinkError(f"no link to {host}:{port} within {timeout_s:g} s: {error}") from error
        link.send(transfer_id.encode())
        return link

    def send(self, data: bytes | memoryview) -> None:
        """Returns when the kernel has taken the bytes, which may be overwritten then."""
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise LinkError(f"sending weights: {error}") from error

    @classmethod
    def expect(cls) -> None:
        """Called before this process makes room for what links of this kind bring. May raise `WeightsError`."""

    @classmethod
    def accept(cls, link: "Link") -> "Link":
        """The receiving end of a link of this kind, of one whose transfer's id has arrived."""
        return link

    @staticmethod
    def room(num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory for a part that is about to be sent, whose tensor is on this device (uint8 [num_bytes])."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def send_part(self, part: Part, data: torch.Tensor) -> None:
        """Sends all bytes of a part, or what changed in it (uint8 [N]): no byte, if nothing did."""
        described = json.dumps(part).encode()
        self.send(_HEAD.pack(len(described), len(data)) + described)
        self.send_data(data)

    def send_data(self, data: torch.Tensor) -> None:
        """Sends the bytes of a message (uint8 [N]), which may be overwritten when it returns."""
        self.send(memory_of(data))

    def receive_data(self, into: torch.Tensor) -> None:
        """Waits until the bytes of a message have arrived (uint8 [N])."""
        self.receive(memory_of(into))

    def receive(self, into: memoryview) -> None:
        """Waits until as many bytes have arrived as `into` has room for."""
        # By default the kernel wakes the thread for every packet. To wake a core can take as long as to copy a packet.
        try:
            while len(into) > 0:
                piece = into[:_WAKE_BYTES]
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(piece))
                num_bytes = self.connection.recv_into(piece, flags=socket.MSG_WAITALL)
                if num_bytes == 0:
                    raise LinkError("receiving weights: the other end has closed the link")
                into = into[num_bytes:]
        except OSError as error:
            raise LinkError(f"receiving weights: {error}") from error

    def receive_bytes(self, num_bytes: int) -> bytes:
        """Waits until so many bytes have arrived."""
        data = bytearray(num_bytes)
        self.receive(memoryview(data))
        return bytes(data)

    def receive_head(self) -> tuple[Part, int, bytes] | None:
        """The next part, how many bytes of it follow, and the head itself; None at the end."""
        head = self.receive_bytes(_HEAD.size)
        if head == END:
            return None
        length, num_bytes = _HEAD.unpack(head)
        described = self.receive_bytes(length)
        tensor, region = json.loads(described)
        return Part(tensor, tuple((begin, end) for begin, end in region)), num_bytes, head + described

    def interrupt(self) -> None:
        """Ends the link under a thread that waits in it, which gets `LinkError`. What was sent still arrives."""
        with suppress(OSError):  # the other end may be gone
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the link. What was sent still arrives."""
        self.connection.close()


class Route(NamedTuple):
    """Where every rank sends its shards."""

    address: LinkAddress
    transfer_id: str
    changes: bool
    """Whether all hosts of the chain have the version that was sent last."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank has sent."""

    num_links: int = 0
    problem: str = ""
    """Why it could not; empty if it could."""


class OwnShards:
    """What this rank sends of one version after the other."""

    def __init__(self, link: type[Link] = Link) -> None:
        self._link = link
        self._manifest = Manifest()
        self._frozen_id = self._sent_frozen_id = b""
        self._unchanged: set[int] = set()  # tensors, by their index, whose values all hosts have
        self._shards: dict[int, tuple[Part, torch.Tensor]] = {}  # by the tensor's index in the manifest
        self._copies: dict[Part, torch.Tensor] = {}  # of the shards that were sent last; empty if none are kept
        self._pushes_without = 0

    def hold(self, shards: Iterable[Shard], manifest: Manifest, frozen_id: bytes) -> None:
        """Takes what this rank holds of a version."""
        self._manifest, self._frozen_id = manifest, frozen_id
        indices = {spec.name: index for index, spec in enumerate(manifest)}
        self._shards = {}
        for shard in shards:
            if shard.local is not None and shard.local.numel() > 0:
                index = indices[shard.name]
                region = shard.region or [slice(0, size) for size in manifest[index].shape]
                self._shards[index] = Part(index, tuple((s.start, s.stop) for s in region)), shard.local.detach()
        self._pushes_without = max(0, self._pushes_without - 1)

    def release(self) -> None:
        """Lets go of the version's tensors, which may lie in memory that the trainer is about to free."""
        self._shards = {}

    def send(self, route: Route) -> Sent:
        """Sends all shards, or their changes. Raises `LinkError`."""
        wholes = [self._shards[index][0] for index in sorted(self._shards)]
        parts = [piece for whole in wholes for piece in _pieces(whole, self._manifest, self._link.part_bytes)]
        if not parts:
            return Sent()
        frozen = {index for index in self._shards if self._manifest[index].frozen}
        have_frozen = route.changes and self._frozen_id == self._sent_frozen_id
        self._unchanged, self._sent_frozen_id = frozen if have_frozen else set(), self._frozen_id
        trained = dict(shard for index, shard in self._shards.items() if index not in frozen)
        has_copies = self._copies.keys() == trained.keys()
        changes = route.changes and has_copies
        if not has_copies and not self._pushes_without and self._link.carries_changes:
            dtypes = [spec.dtype for spec in self._manifest]
            self._copies = {part: torch.empty(t.shape, dtype=dtypes[part.tensor]) for part, t in trained.items()}
        num_links = -(-LINKS // num_ranks())
        num_bytes = self._send(parts, num_links, route._replace(changes=changes))
        if changes and 2 * num_bytes > sum(part.nbytes(self._manifest) for part in trained):
            self._copies, self._pushes_without = {}, _TRIED_AGAIN
        return Sent(num_links)

    def _send(self, parts: Sequence[Part], num_links: int, route: Route) -> int:
        """Sends over links side by side, and returns how many bytes. One thread more than links casts meanwhile."""
        links, rooms = SimpleQueue[Link](), SimpleQueue[torch.Tensor]()
        largest = max(part.nbytes(self._manifest) for part in parts)
        device = max((local.device for _, local in self._shards.values()), key=lambda device: device.type == "cuda")

        def send(part: Part) -> int:
            room = rooms.get()
            try:
                data = self._data(part, room, route.changes)
                link = links.get()
                try:
                    link.send_part(part, data)
                finally:
                    links.put(link)
            finally:
                rooms.put(room)
            return len(data)

        with ExitStack() as stack:
            for _ in range(num_links):
                links.put(stack.enter_context(closing(self._link.connect(route.address, route.transfer_id))))
            for _ in range(num_links + 1):
                rooms.put(self._link.room(largest, device))
            threads = ThreadPoolExecutor(num_links + 1, "send", initializer=use_one_thread)
            stack.callback(threads.shutdown, cancel_futures=True)
            num_bytes = sum(threads.map(send, parts))
            for _ in range(num_links):
                links.get().send(END)
        return num_bytes

    def _data(self, part: Part, room: torch.Tensor, changes: bool) -> torch.Tensor:
        """The bytes of a part that are sent (uint8 [N])."""
        if part.tensor in self._unchanged:
            return room[:0]
        dtype = self._manifest[part.tensor].dtype
        whole, local = self._shards[part.tensor]
        values, copy = _rows(local, whole, part), self._copies.get(whole)
        last = None if copy is None else _rows(copy, whole, part)
        if not (values.dtype == dtype and values.is_cpu and values.is_contiguous()):
            in_room = room[: part.nbytes(self._manifest)].view(dtype).view(values.shape)
            values = (in_room if last is None or changes or values.is_cuda else last).copy_(values)
        data = bytes_of(values)
        found = changes_of(data, bytes_of(last)) if last is not None and changes else None
        if last is not None and last is not values:
            last.copy_(values)
        return data if found is None else found


def _rows(local: torch.Tensor, whole: Part, part: Part) -> torch.Tensor:
    """What a shard has of one of its pieces."""
    if not part.region:
        return local
    begin, end = (row - whole.region[0][0] for row in part.region[0])
    return local[begin:end]


def _pieces(part: Part, manifest: Manifest, max_bytes: int) -> Iterator[Part]:
    """Pieces along dim 0 of at most `max_bytes`, or of a single row."""
    size = part.nbytes(manifest)
    if size <= max_bytes:
        yield part
        return
    (begin, end), *others = part.region
    rows = max(1, max_bytes // (size // (end - begin)))
    for first in range(begin, end, rows):
        yield Part(part.tensor, ((first, min(first + rows, end)), *others))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor (uint8 [N])."""
    return tensor.view(-1).view(torch.uint8)


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of a tensor of bytes, which the result keeps alive."""
    return memoryview(cast(Any, data.numpy()))
