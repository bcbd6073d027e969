"""Messages: how the bytes of a version travel from process to process, each over a TCP connection of its own, a link.

    trainer rank --connect, send_messages--> receiving process --connect, send_messages--> the next host's process
                                             receive_plan, receive_message

A link brings the id of its transfer, then the plan, which says which parts of which tensors each message holds, and
then the messages, each after its length: all bytes of its parts or, if that is less, what changed since the version
that the other end has. What arrives is never run, but neither end proves who it is and nothing is encrypted: links are
for networks that one trusts.
"""

import json
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, NamedTuple

import torch

from rl.weights.transport import Shard
from rl.weights.versions import Manifest, WeightsError, element_sum

LINK_TIMEOUT_S = 20.0
"""The usual `LinkAddress.timeout_s`: a link survives an interruption of ten seconds."""

MESSAGE_BYTES = 2 << 20
"""The most that a message carries: hosts pass a message on while the next one arrives. A single row may be larger."""

CAST_AHEAD = 3
"""Messages that a trainer rank casts while it sends the one before them."""

_ALONE_BYTES = 1 << 17  # smaller parts share messages, because a message costs as much as copying this twice
_ALIGN_BYTES = 8  # of a part in a message, so that it can be viewed in any dtype
_ID_BYTES = 32  # of `uuid4().hex`
_LENGTH = struct.Struct("=Q")  # of the plan, and of each message
_BLOCK = 1 << 16  # pairs of bytes, whose places in it are two bytes each


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


Message = tuple[Part, ...]
"""Parts that are sent at once, one behind the other."""

Values = Callable[[Part], torch.Tensor]
"""Finds the values of a part."""


class Link:
    """One end of a connection. The methods that send and receive raise `LinkError`."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """The sending end is made by `connect`."""
        # The kernel's limit, so that one call receives a whole message. With Python's, each piece wakes the thread.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def send(self, data: bytes | memoryview) -> None:
        """Returns when the kernel has taken the bytes, which may be overwritten then."""
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise LinkError(f"sending weights: {error}") from error

    def receive(self, into: memoryview) -> None:
        """Waits until as many bytes have arrived as `into` has room for."""
        try:
            while len(into) > 0:
                num_bytes = self._connection.recv_into(into, flags=socket.MSG_WAITALL)
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

    def receive_id(self) -> str:
        """The id of the transfer that the link is for, which comes first."""
        return self.receive_bytes(_ID_BYTES).decode("ascii", "replace")

    def receive_end(self) -> None:
        """Waits until the other end closes the link, which must not bring any further bytes."""
        try:
            if self._connection.recv(1):
                raise LinkError("receiving weights: more arrived than was planned")
        except OSError as error:
            raise LinkError(f"receiving weights: {error}") from error

    def interrupt(self) -> None:
        """Ends the link under a thread that waits in it, which gets `LinkError`. What was sent still arrives."""
        with suppress(OSError):  # the other end may be gone
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the link. What was sent still arrives."""
        self._connection.close()


def connect(address: LinkAddress, transfer_id: str) -> Link:
    """The sending end of a link. Raises `LinkError`."""
    host, port, timeout_s = address
    try:
        link = Link(socket.create_connection((host, port), timeout_s), timeout_s)
    except OSError as error:
        raise LinkError(f"no link to {host}:{port} within {timeout_s:g} s: {error}") from error
    link.send(transfer_id.encode())
    return link


def cut_messages(parts: Iterable[Part], manifest: Manifest) -> Iterator[Message]:
    """Cuts parts into messages. Large parts are cut along dim 0, small ones share messages."""
    together: list[Part] = []
    filled = 0
    for part in parts:
        for piece in _pieces(part, manifest):
            size = piece.nbytes(manifest)
            if size >= _ALONE_BYTES:
                yield (piece,)
                continue
            if filled + size > MESSAGE_BYTES:
                yield tuple(together)
                together, filled = [], 0
            together.append(piece)
            filled += _aligned(size)
    if together:
        yield tuple(together)


def send_messages(
    link: Link,
    messages: Sequence[Message],
    manifest: Manifest,
    values: Values,
    *,
    known: Values | None = None,
    keep: Values | None = None,
    ready: Callable[[], None] | None = None,
    ahead: int = 0,
) -> None:
    """Sends messages. Raises `LinkError`, and what `ready` and `values` raise.

    Values may be of any dtype and on any device: a thread casts up to `ahead` messages while an earlier one is sent. It
    calls `ready` before each message, which returns when the values are there. `known` finds what the other end has, of
    which only changes are sent; `keep` finds where a copy of what is sent is kept.
    """
    plan = json.dumps(messages).encode()
    link.send(_LENGTH.pack(len(plan)) + plan)
    rooms = deque(torch.empty(0, dtype=torch.uint8) for _ in range(ahead + 1))
    casts: deque[Future[torch.Tensor]] = deque()

    def cast(message: Message) -> torch.Tensor:
        if ready is not None:
            ready()
        rooms.rotate()
        if len(rooms[0]) < (size := _size(message, manifest)):
            rooms[0] = torch.empty(max(size, MESSAGE_BYTES), dtype=torch.uint8)
        data = _gathered(message, manifest, values, rooms[0])
        changes = None if known is None else changes_of(data, _gathered(message, manifest, known))
        if keep is not None:
            for part, view in zip(message, _views(message, manifest, data), strict=True):
                keep(part).copy_(view)
        return data if changes is None else changes

    with ThreadPoolExecutor(1, "cast", initializer=torch.set_grad_enabled, initargs=(False,)) as thread:
        try:
            for message in messages:
                casts.append(thread.submit(cast, message))
                if len(casts) > ahead:
                    _send(link, casts.popleft().result())
            while casts:
                _send(link, casts.popleft().result())
        finally:
            thread.shutdown(cancel_futures=True)


class OwnShards:
    """What this rank sends of one version."""

    def __init__(self, manifest: Manifest, sums_wanted: bool, sent: dict[int, torch.Tensor]) -> None:
        """`sent` has the shards of the last push by the tensor's index, and gets the ones of this push."""
        self._manifest = manifest
        self._sent = sent
        self._indices = {spec.name: index for index, spec in enumerate(manifest)}
        self._shards: dict[int, tuple[Part, torch.Tensor]] = {}  # by the tensor's index in the manifest
        self._sums_wanted = sums_wanted
        self._sums: dict[int, int] = {}

    def add(self, shard: Shard) -> None:
        """Adds what this rank holds of a tensor."""
        if shard.local is not None:
            index = self._indices[shard.name]
            region = shard.region or [slice(0, size) for size in self._manifest[index].shape]
            self._shards[index] = Part(index, tuple((s.start, s.stop) for s in region)), shard.local

    def send(self, address: LinkAddress, transfer_id: str, changes: bool) -> dict[int, int]:
        """Sends all shards, or their `changes`. Returns the sums of their bits, if wanted. Raises `LinkError`."""
        self._sums = {}
        for index, (_, local) in self._shards.items():
            if index not in self._sent:
                self._sent[index] = torch.empty(local.shape, dtype=self._manifest[index].dtype)
        parts = [self._shards[index][0] for index in sorted(self._shards)]
        with closing(connect(address, transfer_id)) as link:
            messages = list(cut_messages(parts, self._manifest))
            known = self._last if changes else None
            send_messages(link, messages, self._manifest, self._values, known=known, keep=self._last, ahead=CAST_AHEAD)
        return self._sums

    def _last(self, part: Part) -> torch.Tensor:
        return self._rows(self._sent[part.tensor], part)

    def _rows(self, local: torch.Tensor, part: Part) -> torch.Tensor:
        if not part.region:
            return local
        first = self._shards[part.tensor][0].region[0][0]
        begin, end = part.region[0]
        return local[begin - first : end - first]

    def _values(self, part: Part) -> torch.Tensor:
        local = self._rows(self._shards[part.tensor][1], part)
        if self._sums_wanted:
            local = local.to(self._manifest[part.tensor].dtype)
            self._sums[part.tensor] = self._sums.get(part.tensor, 0) + element_sum(local)
        return local


def _send(link: Link, data: torch.Tensor) -> None:
    link.send(_LENGTH.pack(data.nbytes))
    link.send(_memory(data))


def receive_plan(link: Link) -> list[Message]:
    """The messages that a link will bring. Raises `LinkError`."""
    (length,) = _LENGTH.unpack(link.receive_bytes(_LENGTH.size))
    plan = json.loads(link.receive_bytes(length))
    return [tuple(Part(t, tuple((begin, end) for begin, end in region)) for t, region in parts) for parts in plan]


def receive_message(
    link: Link, message: Message, manifest: Manifest, places: Values, known: Values | None = None
) -> None:
    """Receives the next message into the places of its parts. Raises `LinkError`.

    `known` finds the values that the sender has taken to be here.
    """
    tensors, size = [places(part) for part in message], _size(message, manifest)
    is_direct = len(tensors) == 1 and tensors[0].is_contiguous()
    data = _flat(tensors[0]) if is_direct else torch.empty(size, dtype=torch.uint8)
    (length,) = _LENGTH.unpack(link.receive_bytes(_LENGTH.size))
    if length == size:
        link.receive(_memory(data))
    elif known is None or length > size:
        raise LinkError(f"receiving weights: a message has {length} bytes in place of {size}")
    else:
        changes = torch.empty(length, dtype=torch.uint8)
        link.receive(_memory(changes))
        data.copy_(_gathered(message, manifest, known))
        _apply(changes, data)
    if not is_direct:
        for view, tensor in zip(_views(message, manifest, data), tensors, strict=True):
            tensor.copy_(view)


def changes_of(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor | None:
    """What turns `old` into `new` (uint8 [N] both), as uint8 [n]; None if that is hardly less.

    Counts of changed pairs of bytes, int32 for each block of 65,536 pairs; their places in their blocks, and their
    values, two bytes each.
    """
    if len(new) % 8:  # a pair of bytes is looked at only where a word of eight has changed
        return None
    words = (new.view(torch.int64) != old.view(torch.int64)).nonzero()[:, 0]
    if 16 * len(words) > len(new):
        return None
    pairs = new.view(torch.int16).view(-1, 4)
    row, column = (pairs[words] != old.view(torch.int16).view(-1, 4)[words]).nonzero(as_tuple=True)
    places = 4 * words[row] + column
    counts = torch.bincount(places // _BLOCK, minlength=_num_blocks(new)).to(torch.int32)
    found = [counts, places.to(torch.int16), pairs.view(-1)[places]]  # a cast to int16 keeps the last 16 bits
    changes = torch.cat([each.view(torch.uint8) for each in found])
    return changes if len(changes) < len(new) else None


def _apply(changes: torch.Tensor, data: torch.Tensor) -> None:
    """Turns `old` into `new`, in place; see `changes_of`. Raises `LinkError` for changes that are none of `data`."""
    size = 4 * _num_blocks(data)
    counts = changes[:size].view(torch.int32)
    if len(changes) != size + 4 * int(counts.sum()):
        raise LinkError(f"receiving weights: {len(changes)} bytes of changes are no changes of {len(data)} bytes")
    within, values = changes[size:].view(torch.int16).chunk(2)
    block = torch.arange(len(counts)).repeat_interleave(counts)
    data.view(torch.int16)[_BLOCK * block + (within.to(torch.int64) & (_BLOCK - 1))] = values


def _num_blocks(data: torch.Tensor) -> int:
    return -(-len(data) // (2 * _BLOCK))


def _gathered(message: Message, manifest: Manifest, values: Values, room: torch.Tensor | None = None) -> torch.Tensor:
    """A message's bytes (uint8 [N]): where its values are, if that is one place; or else a copy, in `room` if given."""
    tensors = [values(part) for part in message]
    whole, size = tensors[0], _size(message, manifest)
    is_final = whole.dtype == manifest[message[0].tensor].dtype and whole.is_cpu and whole.is_contiguous()
    if is_final and len(tensors) == 1:
        return _flat(whole)
    room = torch.empty(size, dtype=torch.uint8) if room is None else room
    for view, tensor in zip(_views(message, manifest, room), tensors, strict=True):
        view.copy_(tensor)
    return room[:size]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _views(message: Message, manifest: Manifest, data: torch.Tensor) -> Iterator[torch.Tensor]:
    """A view of each part in the message's bytes (uint8 [N])."""
    offset = 0
    for part in message:
        size = part.nbytes(manifest)
        shape = [end - begin for begin, end in part.region]
        yield data[offset : offset + size].view(manifest[part.tensor].dtype).view(shape)
        offset += _aligned(size)


def _size(message: Message, manifest: Manifest) -> int:
    """Size in bytes. The last part has no padding, so a message of one part is that part's bytes."""
    *others, last = (part.nbytes(manifest) for part in message)
    return sum(map(_aligned, others)) + last


def _memory(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


def _pieces(part: Part, manifest: Manifest) -> Iterator[Part]:
    """Pieces along dim 0 of at most `MESSAGE_BYTES`, or of a single row."""
    size = part.nbytes(manifest)
    if size <= MESSAGE_BYTES:
        if size > 0:
            yield part
        return
    (begin, end), *others = part.region
    rows = max(1, MESSAGE_BYTES // (size // (end - begin)))
    for first in range(begin, end, rows):
        yield Part(part.tensor, ((first, min(first + rows, end)), *others))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
