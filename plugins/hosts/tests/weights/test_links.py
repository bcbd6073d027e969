"""What is sent over links side by side arrives in its place, and every error has the link's name."""

import socket
import threading
import weakref
from collections.abc import Generator

import pytest
import torch

from ownloop_hosts.weights import links
from ownloop_hosts.weights.links import (
    PART_BYTES,
    Link,
    LinkAddress,
    LinkError,
    OwnShards,
    Part,
    Route,
    bytes_of,
    memory_of,
)
from rl.weights.version import Shard, build_manifest
from tests.waiting import LIMIT_S

ROWS = 5 * (PART_BYTES // 4000) // 4  # that take more than one message, and less than two
SPECS = [
    ("large", (ROWS, 1000), torch.float32),
    ("columns", (30, 8), torch.bfloat16),
    ("scale", (), torch.int64),
    ("empty", (0, 4), torch.bfloat16),
]
MANIFEST = build_manifest(SPECS)
TENSORS = [torch.randn(ROWS, 1000), torch.randn(30, 8), torch.tensor(7), torch.zeros(0, 4)]


def _shards() -> list[Shard]:
    """All of each tensor but the second, of which three columns."""
    regions = [(), (slice(0, 30), slice(2, 5)), (), ()]
    return [
        Shard(spec.name, tensor, tensor[region], region)
        for spec, tensor, region in zip(MANIFEST, TENSORS, regions, strict=True)
    ]


@pytest.fixture
def ends() -> Generator[tuple[Link, Link]]:
    """Both ends of a link."""
    server = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    with server, ours, theirs:
        yield Link(ours, LIMIT_S), Link(theirs, LIMIT_S)


class Server:
    """Takes links, and keeps what they bring."""

    def __init__(self, num_links: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.route = Route(LinkAddress("127.0.0.1", self._server.getsockname()[1], LIMIT_S), "x" * 32, changes=False)
        self.received: dict[Part, torch.Tensor] = {}
        self._threads = [threading.Thread(target=self._receive) for _ in range(num_links)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT_S)
        self._server.close()

    def _receive(self) -> None:
        link = Link(self._server.accept()[0], LIMIT_S)
        assert link.receive_bytes(32) == b"x" * 32
        while (head := link.receive_head()) is not None:
            part, num_bytes, _ = head
            data = torch.empty(num_bytes, dtype=torch.uint8)
            link.receive(memory_of(data))
            assert part not in self.received
            self.received[part] = data
        link.close()


@pytest.mark.parametrize(("num_links", "part_bytes", "num_parts"), [(1, PART_BYTES, 4), (3, 4000, ROWS + 2)])
def test_parts_arrive_once_cast_and_with_their_places(
    num_links: int, part_bytes: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LINKS", num_links)
    monkeypatch.setattr(Link, "part_bytes", part_bytes)
    server, shards = Server(num_links), OwnShards()
    shards.hold(_shards(), MANIFEST, b"")
    sent = shards.send(server.route)
    server.join()
    assert (sent.num_links, len(server.received)) == (num_links, num_parts)
    covered = [torch.zeros(spec.shape, dtype=torch.int64) for spec in MANIFEST]
    for part, received in server.received.items():
        assert part.nbytes(MANIFEST) <= part_bytes
        expected = TENSORS[part.tensor][part.slices].to(SPECS[part.tensor][2]).contiguous()
        assert torch.equal(received, bytes_of(expected))
        covered[part.tensor][part.slices] += 1
    assert covered[0].min() == covered[0].max() == covered[2] == 1
    assert covered[1].sum(0).tolist() == [0, 0, 30, 30, 30, 0, 0, 0]


def test_what_cannot_be_cast_ends_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LINKS", 1)
    server, shards = Server(0), OwnShards()
    columns = TENSORS[1][:20, 2:5]
    shards.hold([Shard("columns", TENSORS[1], columns, (slice(0, 30), slice(2, 5)))], MANIFEST, b"")
    with pytest.raises(RuntimeError, match="shape"):
        shards.send(server.route)
    server.join()


def test_tensors_are_let_go_after_a_push() -> None:
    shards, scale = OwnShards(), torch.tensor(7)
    kept = weakref.ref(scale.untyped_storage())
    shards.hold([Shard("scale", scale, scale, ())], MANIFEST, b"")
    del scale
    assert kept() is not None
    shards.release()
    assert kept() is None


def test_a_link_that_ends_is_an_error_at_the_other_end(ends: tuple[Link, Link]) -> None:
    ends[0].send(b"abc")
    ends[0].close()
    with pytest.raises(LinkError, match="the other end has closed the link"):
        ends[1].receive_bytes(4)


def test_a_link_is_only_over_when_its_end_was_sent(ends: tuple[Link, Link]) -> None:
    ends[0].send_part(Part(2, ()), torch.zeros(8, dtype=torch.uint8))
    ends[0].close()
    assert ends[1].receive_head() is not None
    ends[1].receive_bytes(8)
    with pytest.raises(LinkError, match="the other end has closed the link"):
        ends[1].receive_head()


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
