"""Covers rl/weights/messages.py: what is sent arrives in its place, and every error has the link's name.

Covers: rl/weights/messages.py
"""

import socket
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch

from rl.weights.messages import (
    CAST_AHEAD,
    MESSAGE_BYTES,
    Link,
    LinkError,
    Message,
    Part,
    Values,
    cut_messages,
    receive_message,
    receive_plan,
    send_messages,
)
from rl.weights.versions import build_manifest
from tests.waiting import LIMIT_S

ROWS = 40
MANIFEST = build_manifest([("rows", (ROWS, 64), torch.bfloat16)])
MESSAGES: list[Message] = [(Part(0, ((row, row + 1), (0, 64))),) for row in range(ROWS)]
WEIGHTS = torch.arange(ROWS * 64, dtype=torch.float32).view(ROWS, 64) % 97


@pytest.fixture
def ends() -> Generator[tuple[Link, Link]]:
    """Both ends of a link."""
    server = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    with server, ours, theirs:
        yield Link(ours, LIMIT_S), Link(theirs, LIMIT_S)


def test_large_parts_are_cut_and_small_ones_share_messages() -> None:
    rows = 5 * (MESSAGE_BYTES // 4000) // 4  # that take more than one message, and less than two
    manifest = build_manifest(
        [("large", (rows, 1000), torch.float32), ("a", (9,), torch.bfloat16), ("b", (), torch.int64)]
    )
    whole = [Part(0, ((0, rows), (0, 1000))), Part(1, ((0, 9),)), Part(2, ())]
    first, second, third = cut_messages(whole, manifest)
    assert [part.region[0] for part in (*first, *second)] == [(0, 524), (524, rows)]
    assert third == (whole[1], whole[2])
    assert first[0].nbytes(manifest) <= MESSAGE_BYTES


@pytest.mark.parametrize("ahead", [0, CAST_AHEAD])
def test_values_arrive_cast_and_in_their_places(ends: tuple[Link, Link], ahead: int) -> None:
    dtypes = (torch.bfloat16, torch.int64, torch.bfloat16, torch.float32)
    # No message of "c" has a multiple of eight bytes.
    manifest = build_manifest(zip("abcd", ((30, 8), (), (3001, 401), (300, 400)), dtypes, strict=True))
    tensors = [torch.randn(30, 8), torch.tensor(7), torch.randn(3001, 401), torch.randn(300, 400)]
    places = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in manifest]
    # Columns lie in several pieces, and a whole tensor in one.
    parts = [Part(0, ((0, 30), (2, 5))), Part(1, ()), Part(2, ((0, 3001), (0, 401))), Part(3, ((0, 300), (0, 400)))]
    messages = list(cut_messages(parts, manifest))
    sending = threading.Thread(
        target=send_messages,
        args=(ends[0], messages, manifest, lambda part: tensors[part.tensor][part.slices]),
        kwargs={"ahead": ahead},
    )
    sending.start()
    assert receive_plan(ends[1]) == messages
    for message in messages:
        receive_message(ends[1], message, manifest, lambda part: places[part.tensor][part.slices])
    sending.join(LIMIT_S)
    ends[0].close()
    ends[1].receive_end()
    assert torch.equal(places[0][:, 2:5], tensors[0][:, 2:5].bfloat16())
    assert not places[0][:, :2].any()
    assert torch.equal(places[1], tensors[1])
    assert torch.equal(places[2], tensors[2].bfloat16())
    assert torch.equal(places[3], tensors[3])


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.01), (0.01, 0.025), (0.1, 0.25), (1.0, 1.01)])
def test_changes_arrive_exactly_and_in_few_bytes(
    ends: tuple[Link, Link], share: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"rows": (3000, 400), "narrow": (300, 402), "odd": (9,), "scale": ()}
    manifest = build_manifest((name, shape, torch.bfloat16) for name, shape in shapes.items())
    random = torch.Generator().manual_seed(7)

    def bits(shape: tuple[int, ...]) -> torch.Tensor:  # of all numbers, not-a-numbers of every kind among them
        return torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16).view(torch.bfloat16)

    old = [bits(shape) for shape in shapes.values()]
    new = [torch.where(torch.rand(each.shape, generator=random) < share, bits(each.shape), each) for each in old]
    kept, places = [each.clone() for each in old], [torch.zeros_like(each) for each in old]
    parts = [Part(i, tuple((0, size) for size in shape)) for i, shape in enumerate(shapes.values())]
    parts[1] = Part(1, ((0, 300), (3, 400)))
    messages, sent = list(cut_messages(parts, manifest)), list[int]()
    original = Link.send
    monkeypatch.setattr(Link, "send", lambda link, data: (sent.append(len(data)), original(link, data))[1])

    def of(tensors: list[torch.Tensor]) -> Values:
        return lambda part: tensors[part.tensor][part.slices]

    options = {"known": of(kept), "keep": of(kept), "ahead": CAST_AHEAD}
    sending = threading.Thread(target=send_messages, args=(ends[0], messages, manifest, of(new)), kwargs=options)
    sending.start()
    for message in receive_plan(ends[1]):
        receive_message(ends[1], message, manifest, of(places), of(old))
    sending.join(LIMIT_S)
    for part in parts:
        for found in (places, kept):
            assert torch.equal(of(found)(part).view(torch.int16), of(new)(part).view(torch.int16))
    assert sum(sent) <= most * sum(each.nbytes for each in new)


def test_changes_of_what_is_not_here_are_refused(ends: tuple[Link, Link]) -> None:
    known = {"known": lambda part: WEIGHTS[part.slices].bfloat16()}
    sending = threading.Thread(
        target=send_messages, args=(ends[0], MESSAGES[:1], MANIFEST, known["known"]), kwargs=known
    )
    sending.start()
    (message,) = receive_plan(ends[1])
    with pytest.raises(LinkError, match="a message has 4 bytes in place of 128"):
        receive_message(ends[1], message, MANIFEST, lambda part: torch.zeros(1, 64, dtype=torch.bfloat16))
    sending.join(LIMIT_S)


def test_nothing_is_overwritten_before_it_is_sent() -> None:
    cast, sent = threading.Semaphore(0), list[torch.Tensor]()

    def values(part: Part) -> torch.Tensor:
        cast.release()
        return WEIGHTS[part.slices]

    class SlowLink:
        """Takes the bytes of a message when all that may be cast before are cast."""

        def send(self, data: Any) -> None:
            if isinstance(data, memoryview):
                if len(sent) < ROWS - CAST_AHEAD:
                    for _ in range(1 + CAST_AHEAD if not sent else 1):
                        assert cast.acquire(timeout=LIMIT_S)
                sent.append(torch.frombuffer(bytearray(data), dtype=torch.bfloat16))

    link: Any = SlowLink()
    send_messages(link, MESSAGES, MANIFEST, values, ahead=CAST_AHEAD)
    assert torch.equal(torch.stack(sent), WEIGHTS.bfloat16())


@pytest.mark.parametrize("at", [0, 17, ROWS - 1])
def test_an_error_while_casting_reaches_the_sender(ends: tuple[Link, Link], at: int) -> None:
    def values(part: Part) -> torch.Tensor:
        if part.region[0][0] == at:
            raise RuntimeError("the device is gone")
        return WEIGHTS[part.slices]

    with pytest.raises(RuntimeError, match="the device is gone"):
        send_messages(ends[0], MESSAGES, MANIFEST, values, ahead=CAST_AHEAD)


def test_a_link_that_ends_is_an_error_at_the_other_end(ends: tuple[Link, Link]) -> None:
    ends[0].send(b"abc")
    ends[0].close()
    with pytest.raises(LinkError, match="the other end has closed the link"):
        ends[1].receive_bytes(4)


def test_bytes_that_were_not_planned_are_an_error(ends: tuple[Link, Link]) -> None:
    ends[0].send(b"a")
    with pytest.raises(LinkError, match="more arrived than was planned"):
        ends[1].receive_end()


def test_an_interrupted_link_wakes_the_thread_that_waits(ends: tuple[Link, Link]) -> None:
    errors: list[LinkError] = []

    def receive() -> None:
        try:
            ends[1].receive_bytes(4)
        except LinkError as error:
            errors.append(error)

    receiving = threading.Thread(target=receive)
    receiving.start()
    ends[1].interrupt()
    receiving.join(LIMIT_S)
    assert len(errors) == 1
