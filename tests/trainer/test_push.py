"""What is published, from any sharding, is the full tensors cast to the generator's dtype."""

import asyncio
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from rl.weights.memory import is_kept
from rl.weights.shared_memory import Workers
from rl.weights.store import INDEX_KEY, living_versions
from rl.weights.version import WeightsError
from tests.stores import FakeStore, key_of, living, read_buffer
from trainer.engines.contract.plain_ranks import spawn
from trainer.push import WeightPublisher


def _full(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"rows": (12, 5), "uneven": (7, 3), "one_row": (1, 6), "columns": (4, 9), "copied": (6,), "plain": (3, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _assert_published(store: FakeStore, version: int, expected: dict[str, torch.Tensor]) -> None:
    record = living(store)[-1]
    assert record.version == version
    published = read_buffer(record)
    assert published.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(published[name], tensor.to(torch.bfloat16)), name


def _run(rank: int, body: Callable[[int, FakeStore], None]) -> None:
    dist.init_process_group("gloo")
    body(rank, FakeStore())


def _publish_shards(rank: int, store: FakeStore) -> None:
    mesh = init_device_mesh("cpu", (2,))
    placements: dict[str, Placement] = {
        "rows": Shard(0),
        "uneven": Shard(0),
        "one_row": Shard(0),
        "columns": Shard(1),
        "copied": Replicate(),
    }
    publisher = WeightPublisher(torch.bfloat16, store=store)
    for version in (1, 2, 3):
        if version == 3:
            placements["rows"] = Shard(1)
        full = _full(version)
        tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(full[name], mesh, [placement]) for name, placement in placements.items()
        }
        if rank == 1:  # a pipeline stage of its own
            tensors["plain"] = full["plain"]
        asyncio.run(publisher.publish(version, tensors.items()))
        if rank == 0:
            _assert_published(store, version, full)
            assert [record.version for record in living(store)] == [v for v in (version - 1, version) if v > 0]
    # What one rank cannot write, no rank publishes, and nobody waits for anybody.
    longer = distribute_tensor(torch.zeros(13, 5), mesh, [Shard(0)])
    wrong = {**tensors, "rows": longer} if rank == 0 else tensors
    with pytest.raises((WeightsError, ValueError), match=r"'rows' was \(12, 5\) and is \(13, 5\)"):
        asyncio.run(publisher.publish(4, wrong.items()))
    asyncio.run(publisher.publish(5, tensors.items()))
    if rank == 0:
        _assert_published(store, 5, _full(3))
    # Nothing is gathered: beside the shared buffer, a push takes no memory.
    half = DTensor.from_local(torch.ones(2048, 4096), mesh, [Shard(0)])
    before = _private_bytes()
    asyncio.run(WeightPublisher(torch.bfloat16, "shared_memory", store=store).publish(1, {"half": half}.items()))
    assert _private_bytes() - before < half.to_local().nbytes / 4


def _private_bytes() -> int:
    """Memory of this process that no other has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.ranks
def test_two_ranks_publish_their_shards() -> None:
    spawn(2, _run, _publish_shards)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 12, bias=False)
        self.down = nn.Linear(12, 10, bias=False)


def _publish_fsdp_times_tp(rank: int, store: FakeStore) -> None:
    torch.manual_seed(0)
    block = _Block()
    full = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
    assert all(isinstance(parameter, DTensor) for parameter in block.parameters())
    publisher = WeightPublisher(torch.bfloat16, store=store)
    asyncio.run(publisher.publish(1, block.named_parameters()))
    if rank == 0:
        _assert_published(store, 1, full)


@pytest.mark.ranks
def test_fsdp_times_tensor_parallel() -> None:
    spawn(4, _run, _publish_fsdp_times_tp)


def test_one_rank_publishes_plain_tensors_and_reuses_its_buffers() -> None:
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    buffers: set[Any] = set()
    for version in range(5):
        full = _full(version)
        asyncio.run(publisher.publish(version, ((name, nn.Parameter(tensor)) for name, tensor in full.items())))
        _assert_published(store, version, full)
        buffers.add(living(store)[-1].location)
    assert len(buffers) == 2


def test_parameters_that_are_replaced_or_moved_are_pushed_and_none_is_held() -> None:
    """A trainer that sleeps gives a parameter other memory; its GPU's is free only if nothing else refers to it."""
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    for version in (1, 3, 5):
        parameters = {name: nn.Parameter(tensor) for name, tensor in _full(version).items()}
        asyncio.run(publisher.publish(version, parameters.items()))
        _assert_published(store, version, _full(version))
        memory = [weakref.ref(parameter.untyped_storage()) for parameter in parameters.values()]
        for name, tensor in _full(version + 1).items():
            parameters[name].data = tensor
        assert all(reference() is None for reference in memory)
        asyncio.run(publisher.publish(version + 1, parameters.items()))
        _assert_published(store, version + 1, _full(version + 1))


def test_parts_that_vllm_fuses_are_neighbours() -> None:
    """torchtitan has the down projection between them, and files of weights are in the order of the alphabet."""
    layer = "model.layers.1."
    names = ["model.norm.weight", *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "down", "up"))]
    names += [f"{layer}self_attn.{name}_proj.{kind}" for name in ("k", "o", "v", "q") for kind in ("bias", "weight")]
    names += ["model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.gate_proj.weight"]
    tensors = {name: torch.randn(32, 3) for name in names}
    store = FakeStore()
    asyncio.run(WeightPublisher(torch.bfloat16, store=store).publish(1, tensors.items()))
    _assert_published(store, 1, tensors)
    published = [spec.name for spec in living(store)[-1].manifest]
    assert published == [
        "model.norm.weight",
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"{layer}self_attn.{name}_proj.bias" for name in ("q", "k", "v")),
        *(f"{layer}self_attn.{name}_proj.weight" for name in ("q", "k", "v")),
        *(f"{layer}self_attn.o_proj.{kind}" for kind in ("bias", "weight")),
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    ]


def test_a_tensor_left_out_later_is_refused() -> None:
    publisher = WeightPublisher(torch.float32, store=FakeStore())
    asyncio.run(publisher.publish(0, _full(0).items()))
    fewer = {name: tensor for name, tensor in _full(1).items() if name != "plain"}
    with pytest.raises(ValueError, match=r"'plain' was \(3, 2\) and is None"):
        asyncio.run(publisher.publish(1, fewer.items()))


class _WatchedStore(FakeStore):
    """Says what could be pulled when the index was put."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.living: list[list[int]] = []

    async def put(self, key: str, value: Any) -> None:
        if self.fails:
            raise OSError("gone")
        await super().put(key, value)
        self.living.append([record.version for record in await living_versions(self)])

    async def delete(self, key: str) -> None:
        if self.fails:
            raise OSError("gone")
        await super().delete(key)


def _living(store: FakeStore) -> list[int]:
    """The versions that can be pulled; each is whole."""
    records = living(store)
    for record in records:
        for name, tensor in _full(record.version).items():
            assert torch.equal(read_buffer(record)[name], tensor.to(torch.bfloat16))
    return [record.version for record in records]


def test_a_buffer_is_introduced_once_and_holds_its_version() -> None:
    store = _WatchedStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    for version in (1, 2, 3, 4):
        asyncio.run(publisher.publish(version, _full(version).items()))
        assert _living(store) == [v for v in (version - 1, version) if v > 0]
    assert store.living == [[], [1]]  # TorchStore heard of two buffers, before there was anything in them
    store.fails = True
    asyncio.run(publisher.publish(5, _full(5).items()))
    assert _living(store) == [4, 5]


def test_a_push_that_fails_leaves_the_version_before() -> None:
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    for version in (1, 2):
        asyncio.run(publisher.publish(version, _full(version).items()))
    with pytest.raises(ValueError, match="'plain'"):
        asyncio.run(publisher.publish(3, [(n, t) for n, t in _full(3).items() if n != "plain"]))
    assert _living(store) == [2]  # the place of 1 was to be that of 3
    with pytest.raises(ValueError, match="'plain'"):  # and of 4, so that 2 stays however many fail
        asyncio.run(publisher.publish(4, [(n, t) for n, t in _full(4).items() if n != "plain"]))
    assert _living(store) == [2]
    asyncio.run(publisher.publish(5, _full(5).items()))
    assert _living(store) == [2, 5]
    _assert_published(store, 5, _full(5))


def test_a_buffer_unknown_to_torchstore_is_introduced_later() -> None:
    store = _WatchedStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    store.fails = True
    with pytest.raises(WeightsError, match="version 1 was not published: TorchStore failed: gone"):
        asyncio.run(publisher.publish(1, _full(1).items()))
    store.fails = False
    for version in (2, 3, 4):
        asyncio.run(publisher.publish(version, _full(version).items()))
    assert _living(store) == [3, 4]


def test_memory_is_freed_although_torchstore_is_gone() -> None:
    store = _WatchedStore()
    publisher = WeightPublisher(torch.bfloat16, "shared_memory", store=store)
    for version in (1, 2):
        asyncio.run(publisher.publish(version, _full(version).items()))
    locations = [record.location for record in living(store)]
    assert all(map(is_kept, locations))
    store.fails = True
    with pytest.raises(WeightsError, match="versions were not withdrawn: TorchStore failed: gone"):
        asyncio.run(publisher.close())
    assert not any(map(is_kept, locations))


class _Keeping(FakeStore):
    """Deletes nothing."""

    async def delete(self, key: str) -> None:
        raise OSError(f"{key} stays")


def _fail_to_delete(rank: int, _: FakeStore) -> None:
    publisher = WeightPublisher(torch.bfloat16, "torchstore", store=_Keeping())
    for version in (1, 2):
        asyncio.run(publisher.publish(version, _full(version).items()))
    with pytest.raises(WeightsError, match=r"versions were not deleted: TorchStore failed: .* stays"):
        asyncio.run(publisher.publish(3, _full(3).items()))


@pytest.mark.ranks
def test_no_rank_takes_a_failed_push_for_a_good_one() -> None:
    spawn(2, _run, _fail_to_delete)


def test_frozen_tensors_are_copied_once_for_each_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after a checkpoint was loaded, which may have changed them."""
    num_bytes: list[int] = []
    copy = Workers.copy

    def counted(workers: Workers, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        num_bytes.append(sum(destination.nbytes for destination, _ in pairs))
        copy(workers, pairs)

    monkeypatch.setattr(Workers, "copy", counted)
    store, frozen = FakeStore(), ("columns", "plain")
    publisher = WeightPublisher(torch.bfloat16, store=store)
    for version in range(1, 9):
        if version == 5:
            publisher.forget_frozen()
        of = _full(1 if version < 5 else 5)
        full = {name: of[name] if name in frozen else tensor for name, tensor in _full(version).items()}
        asyncio.run(publisher.publish(version, full.items(), frozen))
        _assert_published(store, version, full)
    whole = 2 * sum(tensor.numel() for tensor in _full(1).values())
    trained = whole - 2 * sum(_full(1)[name].numel() for name in frozen)
    assert num_bytes == 2 * [whole, whole, trained, trained]


def test_torchstore_keeps_two_versions() -> None:
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, "torchstore", store=store)
    for version in range(4):
        asyncio.run(publisher.publish(version, _full(version).items()))
    assert [record.version for record in store.values[INDEX_KEY]] == [2, 3]
    assert len(store.values) == 1 + 2 * len(_full(0))
    for record in store.values[INDEX_KEY]:
        for name, tensor in _full(record.version).items():
            assert torch.equal(store.values[key_of(record, name)], tensor.to(torch.bfloat16))


async def test_a_new_version_of_unchanged_weights_is_warned_of() -> None:
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, store=store)
    weights = {"large": torch.zeros(500, 400), "odd": torch.zeros(3)}
    await publisher.publish(1, weights.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await publisher.publish(1, weights.items())  # the same version, on purpose
        weights["large"][100, 77] = 1.0  # between the blocks that a checksum looks at
        await publisher.publish(2, weights.items())
        weights["odd"][2] = 1.0
        await publisher.publish(3, weights.items())
        weights["large"] += 1.0
        await publisher.publish(4, weights.items())
    weights["large"] += 1e-6  # lost in bfloat16
    with pytest.warns(UserWarning, match="version 5 is published with exactly the weights of version 4"):
        await publisher.publish(5, weights.items())


def test_too_little_shared_memory_falls_back_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.weights.memory.available_memory_bytes", lambda: 100)
    store = FakeStore()
    short = r"weights need 0\.0 MB of shared memory and 0\.0 MB are available"
    with pytest.raises(WeightsError, match=short):
        asyncio.run(WeightPublisher(torch.bfloat16, "shared_memory", store=store).publish(1, _full(1).items()))
    assert store.values == {}
    publisher = WeightPublisher(torch.bfloat16, store=store)
    with pytest.warns(UserWarning, match=f"TorchStore carries the weights.*{short}"):
        asyncio.run(publisher.publish(1, _full(1).items()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(publisher.publish(2, _full(2).items()))
    record = store.values[INDEX_KEY][-1]
    assert (record.version, record.transport, record.location) == (2, "torchstore", None)
    for name, tensor in _full(2).items():
        assert torch.equal(store.values[key_of(record, name)], tensor.to(torch.bfloat16))


def test_torchstore_says_that_no_parameter_changed() -> None:
    publisher = WeightPublisher(torch.bfloat16, "torchstore", store=FakeStore())
    weights = _full(0)
    asyncio.run(publisher.publish(1, weights.items()))
    with pytest.warns(UserWarning, match="version 2 is published with exactly the weights of version 1"):
        asyncio.run(publisher.publish(2, weights.items()))
    weights["plain"][2, 1] += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(publisher.publish(3, weights.items()))
