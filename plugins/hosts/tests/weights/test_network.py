"""What is sent over the network arrives whole on every host, or the host keeps what it had."""

import asyncio
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ownloop_hosts.weights import links
from ownloop_hosts.weights.links import Link, OwnShards, Part, Sent, bytes_of
from ownloop_hosts.weights.receiving_process import ReceivingProcess
from plugins.hosts.tests.weights.pushes import assert_read, publisher_to, push, weights
from plugins.hosts.tests.weights.receiving_hosts import (
    host_entry,
    host_processes,
    read_at,
    register,
)
from rl.system.hardware import host_identity
from rl.weights.version import UnknownVersionError, WeightsError
from tests.stores import FakeStore
from trainer.engines.contract.plain_ranks import spawn
from trainer.push import WeightPublisher


@pytest.mark.seconds
def test_every_host_gets_every_version_that_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original = Link.send
    monkeypatch.setattr(Link, "send", lambda link, data: (sent.append(len(data)), original(link, data))[1])
    store = FakeStore()
    with host_processes("h1", "h2", "h3") as hosts:
        register(store, *(host.entry for host in hosts))
        publisher = publisher_to(store)
        records = [push(publisher, version) for version in (1, 2, 3)]
        for record in records[1:]:
            for identity in ("h1", "h2", "h3"):
                assert_read(identity, record, monkeypatch)
        with pytest.raises(UnknownVersionError, match="version 1 is no longer kept"):
            read_at("h2", records[0], monkeypatch)
        with pytest.raises(UnknownVersionError, match="version 3 is not on this host"):
            read_at("h4", records[2], monkeypatch)
    num_bytes = sum(tensor.nbytes for tensor in weights(1).values())
    assert 3 * num_bytes <= sum(sent) <= 3.01 * num_bytes


def test_hosts_that_have_the_version_before_get_its_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original = Link.send
    monkeypatch.setattr(Link, "send", lambda link, data: (sent.append(len(data)), original(link, data))[1])
    store, first, second = FakeStore(), ReceivingProcess(5.0), ReceivingProcess(5.0)
    register(store, host_entry(first, "h1"), host_entry(second, "h2"))
    publisher, tensors, versions = publisher_to(store), weights(1), itertools.count(1)
    num_bytes = 2 * sum(tensor.nbytes for tensor in tensors.values())  # each host passes on to the next

    def pushed() -> float:
        """Changes a hundredth of all elements, pushes, and returns the share of all bytes that was sent."""
        for tensor in tensors.values():
            tensor.view(-1)[::100] += 0.25
        sent.clear()
        record = asyncio.run(publisher.publish(next(versions), tensors.items()))
        assert record is not None
        for identity in ("h1", "h2"):
            read = read_at(identity, record, monkeypatch)
            assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        return sum(sent) / num_bytes

    assert pushed() == pytest.approx(1.0, abs=0.01)
    assert pushed() <= 0.03
    assert pushed() <= 0.03
    register(store, host_entry(first, "h1"), host_entry(ReceivingProcess(5.0), "h2"))  # it has no version
    assert pushed() == pytest.approx(0.5 + 0.02, abs=0.01)  # all of it, after the changes went to the one before
    assert pushed() <= 0.03


def test_a_copy_that_saves_little_is_freed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TRIED_AGAIN", 2)
    monkeypatch.setattr(links, "LINKS", 3)
    sent: list[int] = []
    original = Link.send_part

    def send(link: Link, part: Part, data: torch.Tensor) -> None:
        sent.append(len(data))
        original(link, part, data)

    monkeypatch.setattr(Link, "send_part", send)
    store = FakeStore()
    register(store, host_entry(ReceivingProcess(5.0)))
    publisher, tensors, shares = publisher_to(store), weights(1), list[float]()
    # All elements change in the second push, and a hundredth in the others.
    for version, step in enumerate([1, 1, 100, 100, 100, 100], start=1):
        for tensor in tensors.values():
            tensor.view(-1)[::step] += 0.25
        sent.clear()
        record = asyncio.run(publisher.publish(version, tensors.items()))
        assert record is not None
        read = read_at(host_identity(), record, monkeypatch)
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
        shares.append(sum(sent) / sum(bytes_of(tensor).nbytes for tensor in tensors.values()))
    assert [round(share, 1) for share in shares] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_push_without_a_change_is_noticed() -> None:
    store, receiving = FakeStore(), ReceivingProcess(5.0)
    register(store, host_entry(receiving))
    publisher = publisher_to(store)
    unchanged = weights(1)
    asyncio.run(publisher.publish(1, unchanged.items()))
    with pytest.warns(UserWarning, match="version 2 is published with exactly the weights of version 1"):
        asyncio.run(publisher.publish(2, unchanged.items()))


def test_auto_takes_the_network_only_if_a_host_receives() -> None:
    alone, store = FakeStore(), FakeStore()
    register(store, host_entry(ReceivingProcess(5.0)))
    for directory, transport in ((alone, "shared_memory"), (store, "network")):
        record = push(WeightPublisher(torch.float32, "auto", store=directory), 1)
        assert record.transport == transport
    with pytest.raises(WeightsError, match="no generator host receives weights over the network"):
        push(publisher_to(alone), 1)


def test_too_little_memory_on_a_host_falls_back_on_torchstore(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    register(store, host_entry(ReceivingProcess(5.0)))
    monkeypatch.setattr("ownloop_hosts.weights.receiving_process.available_memory_bytes", lambda: 1000)
    with pytest.warns(
        UserWarning, match=rf"TorchStore carries the weights.*: generator host {re.escape(host_identity())}"
    ):
        assert push(WeightPublisher(torch.float32, "auto", store=store), 1).transport == "torchstore"


def _push_shards(rank: int) -> None:
    """Two ranks with tensors that are sharded by rows or by columns, unevenly, replicated, or on one rank only."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    store = FakeStore()
    if rank == 0:
        register(store, *(host_entry(ReceivingProcess(5.0), identity) for identity in ("h1", "h2")))
    publisher = WeightPublisher(torch.bfloat16, store=store)
    shapes = {"rows": (3001, 1000), "columns": (400, 1800), "one_row": (1, 6), "copied": (6,), "last_stage": (3, 2)}
    placements = {"rows": Shard(0), "columns": Shard(1), "one_row": Shard(0), "copied": Replicate()}
    for version in (1, 2, 3):
        random = torch.Generator().manual_seed(version)
        full = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(full[name], mesh, [place]) for name, place in placements.items()
        }
        if rank == 1:
            tensors["last_stage"] = full["last_stage"]
        record = asyncio.run(publisher.publish(version, tensors.items()))
        if record is not None:
            assert record.transport == "network"
            for identity in ("h1", "h2"):
                read = read_at(identity, record, pytest.MonkeyPatch())
                assert read.keys() == full.keys()
                for name, tensor in full.items():
                    assert torch.equal(read[name], tensor.to(torch.bfloat16)), name
        if version == 2:
            _fail_once(rank, publisher, tensors)
    asyncio.run(publisher.close())


def _fail_once(rank: int, publisher: WeightPublisher, tensors: dict[str, torch.Tensor]) -> None:
    """A push in which one rank sends nothing and the other one fails."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(OwnShards, "send", lambda *_: Sent())
        else:
            patch.setattr(Link, "send_part", lambda link, *_: link.interrupt())
        with pytest.raises(WeightsError, match=r"version 9 reached no generator host.*h1: "):
            asyncio.run(publisher.publish(9, tensors.items()))


@pytest.mark.ranks
def test_shards_of_two_ranks_arrive_as_whole_tensors() -> None:
    spawn(2, _push_shards)
