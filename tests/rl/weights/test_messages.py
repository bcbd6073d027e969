"""Covers rl/weights/messages.py: what is sent arrives in its place, and every error has the link's name."""

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
    manifest = build_manifest(
        [("a", (30, 8), torch.bfloat16), ("b", (), torch.int64), ("c", (300, 400), torch.float32)]
    )
    tensors = [torch.randn(30, 8), torch.tensor(7), torch.randn(300, 400)]
    places = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in manifest]
    # Columns lie in several pieces, and a whole tensor in one.
    parts = [Part(0, ((0, 30), (2, 5))), Part(1, ()), Part(2, ((0, 300), (0, 400)))]
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
    assert torch.equal(places[0][:, 2:5], tensors[0][:, 2:5].bfloat16())
    assert not places[0][:, :2].any()
    assert torch.equal(places[1], tensors[1])
    assert torch.equal(places[2], tensors[2])


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
