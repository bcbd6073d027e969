"""The contract of a transport: what is sent arrives whole, or an error says why not.

Tests of a transport inherit `TransportContract`, and have the fixtures `name` and `store`: the transport's name, and a
store that knows the hosts that it needs.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl.system.hardware import host_identity
from rl.weights.memory import WeightBuffer
from rl.weights.store import VersionIndex, find_record
from rl.weights.version import (
    Manifest,
    Sender,
    Shard,
    UnknownVersionError,
    VersionRecord,
    WeightsError,
    build_manifest,
    load_transport,
)
from tests.stores import FakeStore, living
from tests.waiting import join

MANIFEST = build_manifest([("a", (40, 3), torch.bfloat16), ("b", (5,), torch.float32)])
Ranks = tuple[Callable[..., Any], Callable[..., Any]]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, float(version)) for spec in MANIFEST}


def make_sender(name: str, store: FakeStore, manifest: Manifest = MANIFEST) -> Sender:
    async def get_store() -> FakeStore:
        return store

    sender = load_transport(name).sender(VersionIndex(get_store), reader_timeout_s=5.0, asked=True)
    asyncio.run(sender.prepare(manifest))
    return sender


def send(sender: Sender, name: str, version: int, shards: Sequence[Shard] = (), **fields: Any) -> VersionRecord:
    record = VersionRecord(
        version=version,
        push_index=version - 1,
        manifest=MANIFEST,
        dtype=torch.bfloat16,
        transport=name,
        host=host_identity(),
    )
    shards = shards or [Shard(tensor_name, tensor, tensor, ()) for tensor_name, tensor in weights(version).items()]
    return asyncio.run(sender.send(replace(record, **fields), shards))[0]


def _receive(name: str, record: VersionRecord, store: FakeStore) -> list[dict[str, torch.Tensor] | Exception]:
    """What two ranks of a generator receive, each in a thread of its own while rank 0's event loop fetches."""
    to_rank_one: queue.Queue[Any] = queue.Queue()
    broadcasts: Ranks = (to_rank_one.put, to_rank_one.get)
    receivers = [load_transport(name).receiver(broadcast) for broadcast in broadcasts]
    received: list[Any] = [None, None]

    def load(rank: int, weights: AbstractContextManager[Any]) -> None:
        try:
            with weights as arriving:
                if isinstance(arriving, WeightBuffer):
                    received[rank] = {spec.name: arriving.tensor(spec).clone() for spec in MANIFEST}
                else:
                    received[rank] = dict(arriving)
        except Exception as error:
            received[rank] = error

    async def main() -> None:
        loop = asyncio.get_running_loop()
        opened = (
            receivers[0].open(record, lambda key: asyncio.run_coroutine_threadsafe(store.get(key), loop)),
            receivers[1].open(record, None),
        )
        threads = [threading.Thread(target=load, args=(rank, weights)) for rank, weights in enumerate(opened)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(join, *threads)

    asyncio.run(main())
    return received


class TransportContract:
    """What every transport has to do."""

    def test_the_two_newest_versions_arrive_on_every_rank(self, name: str, store: FakeStore) -> None:
        sender = make_sender(name, store)
        for version in (1, 2, 3):
            send(sender, name, version)
        assert [record.version for record in living(store)] == [2, 3]
        for version in (2, 3):
            for tensors in _receive(name, asyncio.run(find_record(store, version)), store):
                assert isinstance(tensors, dict)
                for spec in MANIFEST:
                    assert torch.equal(tensors[spec.name], weights(version)[spec.name].to(spec.dtype))

    def test_frozen_tensors_are_sent_once(self, name: str, store: FakeStore) -> None:
        """Later shards of them hold something else, which must arrive nowhere. Each of two buffers takes them."""
        times, values = 2 if name.endswith("memory") else 1, dict[int, float]()
        manifest = Manifest(replace(spec, frozen=spec.name == "b") for spec in MANIFEST)
        sender = make_sender(name, store, manifest)
        for version in range(1, 9):
            values[version] = value = 5.0 if version < 5 else 7.0
            b = torch.full((5,), value if (version - 1) % 4 < times else -1.0)
            shards = [Shard(each, tensor, tensor, ()) for each, tensor in {**weights(version), "b": b}.items()]
            send(sender, name, version, shards, manifest=manifest, frozen_id=bytes([int(value)] * 16))
            for record in living(store):
                assert record.frozen_id == bytes([int(values[record.version])] * 16)
                for received in _receive(name, record, store):
                    assert isinstance(received, dict)
                    assert torch.equal(received["a"], weights(record.version)["a"].bfloat16())
                    assert torch.equal(received["b"], torch.full((5,), values[record.version]))
        if name == "torchstore":  # the index, "a" of two versions, "b" of both
            assert len(store.values) == 4

    def test_a_version_that_is_no_longer_kept_is_refused(self, name: str, store: FakeStore) -> None:
        sender = make_sender(name, store)
        stale = send(sender, name, 1)
        for version in (2, 3):
            send(sender, name, version)
        first, _ = _receive(name, stale, store)
        assert isinstance(first, (UnknownVersionError, WeightsError))

    def test_shards_that_do_not_fit_publish_nothing(self, name: str, store: FakeStore) -> None:
        sender = make_sender(name, store)
        second = replace(send(sender, name, 1), version=2, push_index=1)

        def shards() -> Any:
            yield from ()
            raise ValueError("of another shape")

        with pytest.raises(ValueError, match="of another shape"):
            asyncio.run(sender.send(second, shards()))
        assert [record.version for record in living(store)] == [1]
