"""Adapters are published beside the model and beside each other, and what they took is freed when they are dropped."""

import asyncio
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rl.lora import LoRAConfig, tensor_name
from rl.weights.memory import element_sum
from rl.weights.shared_memory import SharedMemoryReceiver
from rl.weights.store import INDEX_KEY, find_record
from rl.weights.version import UnknownVersionError, VersionRecord
from tests.stores import FakeStore, key_of, read_buffer
from trainer.engines.contract.plain_ranks import spawn
from trainer.push import WeightPublisher

A, B = (tensor_name("model.layers.0.mlp.up_proj", which) for which in ("A", "B"))


def _tensors(seed: int, *, rank: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {A: torch.randn((rank, 6), generator=generator), B: torch.randn((10, rank), generator=generator)}


def _publisher(store: FakeStore, policy: str | None, *, rank: int = 8, transport: str = "auto") -> WeightPublisher:
    lora = None if policy is None else LoRAConfig(rank=rank, alpha=16)
    return WeightPublisher(torch.bfloat16, transport, policy=policy, lora=lora, store=store)  # pyright: ignore[reportArgumentType]


def _num_buffers() -> int:
    """Weight buffers that this process maps, as owner or reader, without those that nobody refers to any more."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("ownloop-weights")


@pytest.mark.parametrize("transport", ["shared_memory", "torchstore"])
async def test_every_policy_has_versions_of_its_own(transport: str) -> None:
    store = FakeStore()

    policies = (None, "a", "b")
    for policy, version in zip(policies, (7, 0, 7), strict=True):
        rank = 4 if policy == "b" else 8
        tensors = _tensors(version, rank=rank).items()
        await _publisher(store, policy, rank=rank, transport=transport).publish(version, tensors)
    records = [await find_record(store, v, policy) for policy, v in zip(policies, (7, 0, 7), strict=True)]
    assert [(record.policy, record.lora) for record in records] == [
        (None, None),
        ("a", LoRAConfig(rank=8, alpha=16)),
        ("b", LoRAConfig(rank=4, alpha=16)),
    ]
    with pytest.raises(UnknownVersionError, match="version 7 cannot be pulled; versions that can: 0"):
        await find_record(store, 7, "a")
    assert len({key_of(record, A) for record in records}) == 3


@pytest.mark.seconds
async def test_a_dropped_adapter_leaves_nothing_and_harms_no_other() -> None:
    store, mapped_before = FakeStore(), _num_buffers()
    receiver = SharedMemoryReceiver()

    def read(record: VersionRecord) -> torch.Tensor:
        with receiver.open(record, None) as memory:
            return memory.tensor(record.manifest[0]).clone()

    kept, dropped = _publisher(store, "kept"), _publisher(store, "dropped")
    in_store = _publisher(store, "in_store", transport="torchstore")
    for publisher in (kept, dropped, in_store):
        for version in (1, 2):
            await publisher.publish(version, _tensors(version).items())
    records = [await find_record(store, 2, policy) for policy in ("kept", "dropped")]
    for record in records:
        assert torch.equal(read(record), _tensors(2)[A].bfloat16())
    await dropped.close()
    await in_store.close()
    assert set(store.values) == {f"{INDEX_KEY}/adapters/kept"}
    with pytest.raises(UnknownVersionError, match="nothing was pushed yet"):
        await find_record(store, 2, "dropped")
    await kept.publish(3, _tensors(3).items())
    # The reader lets go of the dropped adapter's buffer when it meets the next one that it does not know.
    assert torch.equal(read(await find_record(store, 3, "kept")), _tensors(3)[A].bfloat16())
    assert _num_buffers() - mapped_before == 4  # two, mapped by the publisher and by the reader
    again = _publisher(store, "dropped")
    await again.publish(0, _tensors(5).items())
    assert torch.equal(read(await find_record(store, 0, "dropped")), _tensors(5)[A].bfloat16())


def test_a_publisher_that_published_nothing_closes() -> None:
    asyncio.run(_publisher(FakeStore(), "a").close())


def _publish_sharded(rank: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    full, store = _tensors(1), FakeStore()
    sharded = {A: distribute_tensor(full[A], mesh, [Replicate()]), B: distribute_tensor(full[B], mesh, [Shard(0)])}
    for policy, transport in (("a", "shared_memory"), ("b", "torchstore")):
        publisher = _publisher(store, policy, transport=transport)
        asyncio.run(publisher.publish(1, sharded.items()))
        if rank == 0:
            record = asyncio.run(find_record(store, 1, policy))
            published = read_buffer(record) if policy == "a" else {n: store.values[key_of(record, n)] for n in full}
            assert all(torch.equal(published[name], full[name].bfloat16()) for name in full)
            # Two replicas hold the same shards; each must count once.
            assert policy == "a" or record.checksums == tuple(element_sum(published[name]) for name in full)
        asyncio.run(publisher.close())


@pytest.mark.ranks
def test_tensor_parallel_replicas_publish_full_tensors() -> None:
    spawn(4, _publish_sharded)
