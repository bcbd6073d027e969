"""Sending and receiving the messages of one version over links, a few of them at a time."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch

from rl.weights.buffer import WeightBuffer
from rl.weights.links import Link, LinkError, Pending, wait
from rl.weights.messages import Message, Part, as_bytes, part_views
from rl.weights.versions import Manifest

_IN_FLIGHT = 8  # so that a link has work while the next message is put in its place, on a busy host too
_CAST_AHEAD = 3  # gloo sends in the calling thread, so another one casts the next messages meanwhile


class Progress:
    """How many messages have arrived, for a thread that passes them on."""

    def __init__(self) -> None:
        """None has arrived."""
        self._changed = threading.Condition()
        self._num_arrived = 0
        self._ended = False

    def arrived(self) -> None:
        """Counts a message."""
        with self._changed:
            self._num_arrived += 1
            self._changed.notify_all()

    def end(self) -> None:
        """No further message will arrive."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, index: int) -> None:
        """Returns when the message with this index has arrived. Raises `LinkError` if it never will."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_arrived > index or self._ended)
            if self._num_arrived <= index:
                raise LinkError("its own transfer broke off")


def send_messages(
    link: Link,
    messages: Sequence[Message],
    manifest: Manifest,
    source: Callable[[Part], torch.Tensor],
    room: Sequence[torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Sends the messages in their order. `source` returns the values of a part, in any dtype and on any device.

    `room` is what `room_to_send` returned for these messages. With `progress`, a message is sent when it has arrived.
    Raises `LinkError`.
    """
    pending: deque[Pending] = deque()
    own = (messages, manifest, source, room)
    with closing(_cast_ahead(*own) if progress is None else _arrived(*own, progress)) as prepared:
        for data in prepared:
            if len(pending) == _IN_FLIGHT:
                wait(pending.popleft(), "sending weights")
            pending.append(link.send(data))
        while pending:
            wait(pending.popleft(), "sending weights")


def _cast_ahead(
    messages: Sequence[Message],
    manifest: Manifest,
    source: Callable[[Part], torch.Tensor],
    room: Sequence[torch.Tensor],
) -> Generator[torch.Tensor]:
    """The bytes of each message. A thread casts the next few while the caller sends."""
    casts: deque[Future[torch.Tensor]] = deque()
    with ThreadPoolExecutor(1, "cast", initializer=torch.set_grad_enabled, initargs=(False,)) as thread:
        try:
            for index, message in enumerate(messages):
                casts.append(thread.submit(as_bytes, message, manifest, source, room[index % len(room)]))
                if len(casts) > _CAST_AHEAD:
                    yield casts.popleft().result()
            while casts:
                yield casts.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def _arrived(
    messages: Sequence[Message],
    manifest: Manifest,
    source: Callable[[Part], torch.Tensor],
    room: Sequence[torch.Tensor],
    progress: Progress,
) -> Generator[torch.Tensor]:
    """The bytes of each message, once it has arrived. They lie in the buffer, so next to nothing is copied."""
    for index, message in enumerate(messages):
        progress.wait_for(index)
        yield as_bytes(message, manifest, source, room[index % len(room)])


def room_to_send(messages: Sequence[Message]) -> list[torch.Tensor]:
    """Memory to cast messages in. It is kept from push to push, because touching new pages takes time."""
    # The last of those in flight may be sent still, and the next one is being waited for, while others are cast.
    return _slots(messages, _IN_FLIGHT + _CAST_AHEAD + 1)


def receive_messages(
    links: Mapping[int, Link],
    messages: Sequence[Message],
    manifest: Manifest,
    buffer: WeightBuffer,
    progress: Progress,
) -> None:
    """Receives the messages into a buffer; `links` has the link of every sender. Raises `LinkError`."""
    slots = _slots(messages, _IN_FLIGHT)
    pending: deque[tuple[Message, torch.Tensor | None, Pending]] = deque()

    def finish_first() -> None:
        message, data, arriving = pending.popleft()
        wait(arriving, f"receiving weights of trainer rank {message.sender}")
        if data is not None:
            for part, view in part_views(message, manifest, data):
                buffer.tensor(manifest[part.tensor])[part.slices].copy_(view)
        progress.arrived()

    for index, message in enumerate(messages):
        if len(pending) == _IN_FLIGHT:
            finish_first()
        place = _place(message, manifest, buffer)
        data = slots[index % _IN_FLIGHT][: message.nbytes] if place is None else None
        arriving = links[message.sender].receive(data if place is None else place)  # pyright: ignore[reportArgumentType]
        pending.append((message, data, arriving))
    while pending:
        finish_first()


def _place(message: Message, manifest: Manifest, buffer: WeightBuffer) -> torch.Tensor | None:
    """Where the message's bytes lie in the buffer (uint8 [N]); None if they lie in several places."""
    part = message.parts[0]
    view = buffer.tensor(manifest[part.tensor])[part.slices]
    return view.view(-1).view(torch.uint8) if len(message.parts) == 1 and view.is_contiguous() else None


def _slots(messages: Sequence[Message], count: int) -> list[torch.Tensor]:
    # Pages that are never written take no memory, so a slot costs nothing where messages go straight to their place.
    size = max((message.nbytes for message in messages), default=0)
    return [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
