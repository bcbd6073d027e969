"""How the bytes of a version are cut into messages: which rank sends which parts of which tensors, in which order.

Trainer ranks and receiving hosts make the same plan from the same shards, so a message carries nothing but bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from rl.weights.versions import Manifest

MESSAGE_BYTES = 2 << 20
"""The most that a message carries: hosts pass a message on while the next one arrives. A single row may be larger."""

_ALONE_BYTES = 1 << 17  # smaller parts share messages, because a message costs as much as copying this twice
_ALIGN_BYTES = 8  # of a part in a message, so that it can be viewed in any dtype

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangular piece of one tensor."""

    tensor: int
    """The tensor's index in the manifest."""
    region: tuple[Span, ...]
    """First element and end along each dim; empty for a tensor without dims."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an index of the full tensor."""
        return tuple(slice(*span) for span in self.region)

    def nbytes(self, manifest: Manifest) -> int:
        """Size in bytes."""
        return math.prod(end - begin for begin, end in self.region) * manifest[self.tensor].dtype.itemsize


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that one rank sends at once, one behind the other."""

    sender: int
    """The trainer rank."""
    parts: tuple[Part, ...]
    nbytes: int
    """Size with padding between the parts."""


def shard_part(manifest: Manifest, tensor: int, region: Sequence[slice]) -> Part:
    """The part that a shard is; an empty `region` stands for the full tensor."""
    shape = manifest[tensor].shape
    whole = tuple((0, size) for size in shape)
    return Part(tensor, tuple((s.start, s.stop) for s in region) if region else whole)


def plan_messages(manifest: Manifest, shards: Sequence[Sequence[Part]]) -> tuple[Message, ...]:
    """The messages of all ranks, in the order in which they arrive; `shards` are each rank's.

    The ranks take turns, so that all of them send at the same time. Raises ValueError if shards do not cover a tensor.
    """
    _check_covered(manifest, shards)
    ordered: list[tuple[int, Message]] = []
    for sender, parts in enumerate(shards):
        sent = 0
        for message in _messages(manifest, sender, parts):
            ordered.append((sent, message))
            sent += message.nbytes
    return tuple(message for _, message in sorted(ordered, key=lambda item: (item[0], item[1].sender)))


def part_views(message: Message, manifest: Manifest, data: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """Each part of a message, and a view of it in the message's bytes (uint8 [N])."""
    offset = 0
    for part in message.parts:
        size = part.nbytes(manifest)
        shape = [end - begin for begin, end in part.region]
        yield part, data[offset : offset + size].view(manifest[part.tensor].dtype).view(shape)
        offset += _aligned(size)


def as_bytes(
    message: Message, manifest: Manifest, source: Callable[[Part], torch.Tensor], scratch: torch.Tensor
) -> torch.Tensor:
    """The bytes to send (uint8 [N]): the source itself if it can be sent as it is, else a copy in `scratch`."""
    if len(message.parts) == 1:
        tensor = source(message.parts[0])
        if tensor.dtype == manifest[message.parts[0].tensor].dtype and tensor.is_contiguous() and tensor.is_cpu:
            return tensor.view(-1).view(torch.uint8)
    data = scratch[: message.nbytes]
    for part, view in part_views(message, manifest, data):
        view.copy_(source(part))
    return data


def _messages(manifest: Manifest, sender: int, parts: Sequence[Part]) -> Iterator[Message]:
    together: list[Part] = []
    filled = 0
    for part in parts:
        for piece in _cut(part, manifest):
            size = piece.nbytes(manifest)
            if size >= _ALONE_BYTES:
                yield Message(sender, (piece,), size)
                continue
            if filled + size > MESSAGE_BYTES:
                yield Message(sender, tuple(together), filled)
                together, filled = [], 0
            together.append(piece)
            filled += _aligned(size)
    if together:
        yield Message(sender, tuple(together), filled)


def _cut(part: Part, manifest: Manifest) -> Iterator[Part]:
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


def _check_covered(manifest: Manifest, shards: Sequence[Sequence[Part]]) -> None:
    # A part that nobody sends would silently keep the bytes of an older version.
    covered = [0] * len(manifest)
    for parts in shards:
        for part in parts:
            covered[part.tensor] += part.nbytes(manifest)
    for spec, num_bytes in zip(manifest, covered, strict=True):
        if num_bytes != spec.nbytes:
            raise ValueError(
                f"{spec.name!r}: the ranks' shards hold {num_bytes} bytes; the tensor has {spec.nbytes}, each of which "
                "one rank has to send"
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
