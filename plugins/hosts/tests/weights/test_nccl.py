"""By NCCL, versions arrive whole as over the network, through communicators that are kept while both ends live."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import Generator
from queue import SimpleQueue

import pytest
import torch

from ownloop_hosts.weights.links import END, ID_BYTES, Link, LinkAddress, LinkError, Part
from ownloop_hosts.weights.nccl import NCCLLink
from ownloop_hosts.weights.receiving_process import ReceivingProcess
from plugins.hosts.tests.weights.host_pairs import HostPairs, QueuePair
from plugins.hosts.tests.weights.pushes import Tensors, assert_read, push, weights
from plugins.hosts.tests.weights.receiving_hosts import host_entry, host_processes, read_at, register
from rl.lora import LoRAConfig
from rl.weights.version import UnknownVersionError, VersionRecord, WeightsError
from tests.stores import FakeStore
from tests.waiting import join, wait_until
from trainer.push import WeightPublisher


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Generator[list[QueuePair]]:
    """All pairs of this test, which need no GPU."""
    monkeypatch.setattr(NCCLLink, "maker", HostPairs())
    HostPairs.pairs.clear()
    yield HostPairs.pairs
    NCCLLink.end_idle()


def _publisher(store: FakeStore, dtype: torch.dtype = torch.float32) -> WeightPublisher:
    return WeightPublisher(dtype, "nccl", store=store)


def test_pairs_bring_versions_to_every_host(monkeypatch: pytest.MonkeyPatch, pairs: list[QueuePair]) -> None:
    monkeypatch.setattr("ownloop_hosts.weights.nccl._ROOM_BYTES", 1 << 20)
    monkeypatch.setattr("ownloop_hosts.weights.links.LINKS", 3)
    sent, original = list[int](), Link.send
    monkeypatch.setattr(Link, "send", lambda link, data: (sent.append(len(data)), original(link, data))[1])
    store = FakeStore()
    register(store, *(host_entry(ReceivingProcess(5.0), identity) for identity in ("h1", "h2")))
    publisher = _publisher(store)
    push(publisher, 1)
    first_pairs = list(pairs)
    for version in (2, 3):
        record = push(publisher, version)
        for identity in ("h1", "h2"):
            assert_read(identity, record, monkeypatch)
    assert len(first_pairs) == 2 * 3 * 2, "both ends of three links to each of two hosts"
    assert pairs[: len(first_pairs)] == first_pairs
    assert sum(pair.num_calls for pair in first_pairs) > 6 * 3, "the second push takes the pairs of the first"
    num_bytes = sum(tensor.nbytes for tensor in weights(1).values())
    assert sum(sent) < 0.01 * num_bytes, "connections carry heads only"
    # The last host has everything before the one that passed it on closes its links.
    wait_until(lambda: sum(len(idle) for idle in NCCLLink.idle.values()) == len(pairs), "all links to end")
    asyncio.run(publisher.close())
    assert all(pair.has_ended for pair in pairs)


@pytest.mark.usefixtures("pairs")
def test_a_message_arrives_while_another_is_copied() -> None:
    """In two rooms: the third message waits until the first is copied."""
    messages = [torch.arange(100, dtype=torch.uint8) + n for n in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            link = NCCLLink.connect(LinkAddress("127.0.0.1", server.getsockname()[1], 5.0), "t" * ID_BYTES)
            for message in messages:
                link.send_part(Part(0, ()), message)
            link.send(END)
            link.close()

        sending = threading.Thread(target=send)
        sending.start()
        link = Link(server.accept()[0], 5.0)
        link.receive_bytes(ID_BYTES)
        received = NCCLLink.accept(link)
    (pair,) = [pair for pair in HostPairs.pairs if pair.rank == 1]
    assert received.receive_head() is not None
    wait_until(lambda: pair.num_calls == 2, "two messages to arrive")
    found = [torch.zeros_like(message) for message in messages]
    for number, into in enumerate(found):
        received.receive_data(into)
        assert (received.receive_head() is None) == (number == 2)
    received.close()
    join(sending)
    assert all(torch.equal(a, b) for a, b in zip(found, messages, strict=True))
    assert not pair.has_ended, "a link that brought everything keeps its pair"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pair_that_breaks_is_made_again_within_the_push(
    monkeypatch: pytest.MonkeyPatch, pairs: list[QueuePair], rank: int
) -> None:
    monkeypatch.setattr("ownloop_hosts.weights.links.LINKS", 1)
    store = FakeStore()
    register(store, host_entry(ReceivingProcess(5.0), "h1"))
    publisher = _publisher(store)
    first = push(publisher, 1)
    broken = next(pair for pair in pairs if pair.rank == rank)
    broken.fails_at = broken.num_calls + 2
    second = push(publisher, 2)
    assert_read("h1", second, monkeypatch)
    assert_read("h1", first, monkeypatch)
    assert broken.has_ended
    idle = [pair for of_place in NCCLLink.idle.values() for pair in of_place.values()]
    assert idle
    assert not any(pair.has_ended for pair in pairs if pair in idle)


def test_a_host_whose_process_is_new_gets_new_pairs(monkeypatch: pytest.MonkeyPatch, pairs: list[QueuePair]) -> None:
    store = FakeStore()
    receiving = ReceivingProcess(5.0)
    register(store, host_entry(receiving, "h1"))
    publisher = _publisher(store)
    push(publisher, 1)
    NCCLLink.idle[""].clear()  # what a process that ends takes along
    assert_read("h1", push(publisher, 2), monkeypatch)
    assert [pair.has_ended for pair in pairs if pair.rank == 0].count(True) == len(pairs) // 4


@pytest.mark.usefixtures("pairs")
def test_a_link_that_breaks_in_its_handshake_ends_the_pair() -> None:
    kept = QueuePair(SimpleQueue(), 1, 5.0)
    NCCLLink.idle[""][b"k" * 16] = kept
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sending:
        receiving = Link(server.accept()[0], 5.0)
        sending.sendall(b"k" * 16)
        receiving.connection.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match="sending weights"):
            NCCLLink.accept(receiving)
    assert kept.has_ended
    assert not NCCLLink.idle[""]


@pytest.mark.usefixtures("pairs")
def test_without_gpus_the_first_push_says_who_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    register(store, host_entry(ReceivingProcess(5.0), "h1"))
    monkeypatch.setattr(HostPairs, "why_nots", iter(["", "no GPU is there"]))
    message = "weight_transport='nccl' is not possible: generator host h1: no GPU is there; use 'network'"
    with pytest.raises(WeightsError, match=re.escape(message)):
        push(_publisher(store), 1)
    monkeypatch.setattr(HostPairs, "why_nots", iter(["no GPU is here"]))
    with pytest.raises(WeightsError, match="not possible: this trainer rank: no GPU is here; use 'network'"):
        push(_publisher(store), 1)


@pytest.mark.usefixtures("pairs")
def test_adapters_go_over_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    register(store, host_entry(ReceivingProcess(5.0), "h1"))
    adapter = {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(2, 8)}
    publisher = WeightPublisher(torch.float32, "nccl", policy="a", lora=LoRAConfig(rank=2), store=store)
    record = asyncio.run(publisher.publish(1, adapter.items()))
    assert record is not None
    assert record.transport == "network"
    assert all(torch.equal(read_at("h1", record, monkeypatch)[name], adapter[name]) for name in adapter)


def _be_a_host(process: ReceivingProcess, name: str) -> None:
    del process
    os.environ["NCCL_HOSTID"] = name  # NCCL refuses two ranks on one GPU of a host


@pytest.mark.gpu
def test_gpus_of_other_processes_get_versions_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("NCCL_HOSTID", "trainer")

    def on_gpu(version: int) -> Tensors:
        return {name: tensor.to("cuda:0") for name, tensor in weights(version).items()}

    def pushed(version: int) -> VersionRecord:
        record = asyncio.run(publisher.publish(version, on_gpu(version).items()))
        assert record is not None
        assert record.transport == "nccl"
        return record

    def assert_rounded(identity: str, record: VersionRecord) -> None:
        read = read_at(identity, record, monkeypatch)
        assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in weights(record.version).items())

    with host_processes("h1", "h2", link_timeout_s=20.0) as hosts, host_processes("h1") as replacement:
        for host in (*hosts, *replacement):
            asyncio.run(host.entry.call(_be_a_host, host.entry.process))
        register(store, *(host.entry for host in hosts))
        publisher = _publisher(store, torch.bfloat16)
        for version in (1, 2, 3):
            record = pushed(version)
            for identity in ("h1", "h2"):
                assert_rounded(identity, record)
        original = NCCLLink.send_data

        def send(link: NCCLLink, data: torch.Tensor) -> None:
            hosts[0].process.kill()
            original(link, data)

        with monkeypatch.context() as patch:
            patch.setattr(NCCLLink, "send_data", send)
            with pytest.warns(UserWarning, match="did not reach every generator host"):
                record = pushed(4)
        assert_rounded("h2", record)
        with pytest.raises(UnknownVersionError, match="version 4 is not on this host"):
            read_at("h1", record, monkeypatch)
        register(store, replacement[0].entry, hosts[1].entry)
        record = pushed(5)
        for identity in ("h1", "h2"):
            assert_rounded(identity, record)
        asyncio.run(publisher.close())
    assert not any(NCCLLink.idle.values())
