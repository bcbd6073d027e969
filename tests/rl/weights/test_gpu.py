"""Weights from GPU to GPU of one host. Memory of the host stands for the GPUs', in processes of their own."""

import asyncio
import ctypes
import multiprocessing
import operator
import sys
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl.lora import LoRAConfig
from rl.weights import gpu
from rl.weights.gpu import PATTERN, CUDASharing, GPUMemory, cut, unreachable_gpus, why_not_opened
from rl.weights.version import PublisherGoneError, UnknownVersionError, VersionRecord, WeightsError, build_manifest
from tests.rl import cuda_driver
from tests.rl.weights.host_sharing import HostSharing
from tests.stores import FakeStore, living
from tests.waiting import join
from trainer.engines.contract.plain_ranks import preloaded_forkserver, spawn
from trainer.push import WeightPublisher

SHAPES = {"embedding": (300, 10), "norm": (7,), "scale": (), "up": (41, 7), "down": (30, 10)}


def weights(version: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def read(record: VersionRecord) -> dict[str, torch.Tensor]:
    with GPUMemory().receiver(lambda: None).open(record, None) as memory:
        return {spec.name: memory.tensor(spec).clone() for spec in record.manifest}


def assert_holds(record: VersionRecord, version: int) -> None:
    for name, tensor in read(record).items():
        assert torch.equal(tensor, weights(version)[name].bfloat16()), name


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CUDASharing", HostSharing)


def _publish_and_read(rank: int) -> None:
    gpu.CUDASharing = HostSharing  # pyright: ignore[reportAttributeAccessIssue]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    publisher = WeightPublisher(torch.bfloat16, "gpu_memory", store=FakeStore())
    records: list[Any] = [None]
    for version in (1, 2, 3):
        tensors = weights(version)
        for name in ("embedding", "up", "down"):
            tensors[name] = distribute_tensor(tensors[name], mesh, [Shard(0)])
        records = [asyncio.run(publisher.publish(version, tensors.items()))]
        dist.broadcast_object_list(records)
        assert_holds(records[0], version)
    parts = records[0].location.gpu_parts
    assert len({part.gpu for part in parts}) == len(parts) == 2, "each rank's GPU holds a part"
    dist.barrier()
    HostSharing.refused = rank == 1
    with pytest.raises(WeightsError, match="out of reach"):
        asyncio.run(WeightPublisher(torch.bfloat16, "gpu_memory", store=FakeStore()).publish(1, weights(1).items()))


@pytest.mark.ranks
def test_gpu_logic_ranks_write_shards_into_each_others_memory() -> None:
    spawn(2, _publish_and_read)


def _serve(pipe: "Connection[Any, Any]", sharing: bool) -> None:
    if sharing:
        gpu.CUDASharing = HostSharing  # pyright: ignore[reportAttributeAccessIssue]
    device = "cpu" if sharing else "cuda"
    publisher = WeightPublisher(torch.bfloat16, "gpu_memory", store=FakeStore())
    while True:
        version = pipe.recv()
        tensors = {name: tensor.to(device) for name, tensor in weights(version).items()}
        pipe.send(asyncio.run(publisher.publish(version, tensors.items())))


def _read_from_a_process_that_dies(context: Any, *, sharing: bool) -> None:
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, sharing), daemon=True)
    process.start()
    theirs.close()
    try:
        records: list[VersionRecord] = []
        for version in (1, 2, 3):
            pipe.send(version)
            records.append(pipe.recv())
            assert {name: t.cpu().tolist() for name, t in read(records[-1]).items()} == {
                name: t.bfloat16().tolist() for name, t in weights(version).items()
            }
        read(records[1])
        with pytest.raises(UnknownVersionError):
            read(records[0])
        receiver = GPUMemory().receiver(lambda: None)
        with receiver.open(records[-1], None):
            pass
    finally:
        process.kill()
        join(process)
    with pytest.raises(PublisherGoneError):
        read(records[-1])
    with pytest.raises(PublisherGoneError), receiver.open(records[-1], None):
        raise AssertionError("CUDA has freed the memory that the receiver has open")


@pytest.mark.seconds
@pytest.mark.usefixtures("on_host")
def test_gpu_logic_a_process_reads_until_the_publisher_dies() -> None:
    _read_from_a_process_that_dies(preloaded_forkserver(), sharing=True)


@pytest.mark.gpu
def test_another_process_opens_memory_of_the_gpu() -> None:
    torch.zeros(1, device="cuda")
    _read_from_a_process_that_dies(multiprocessing.get_context("spawn"), sharing=False)


@pytest.mark.gpu
def test_memory_that_a_gpu_lacks_is_refused_and_harms_nothing() -> None:
    with pytest.raises(WeightsError, match="MB of GPU memory are not free: CUDA refused: CUDA_ERROR_OUT_OF_MEMORY"):
        CUDASharing().allocate(0, 1 << 45)
    assert float(torch.ones(8, device="cuda").sum()) == 8, "torch does not raise what CUDA refused"


@pytest.mark.usefixtures("on_host")
def test_gpu_logic_a_byte_that_changes_is_found() -> None:
    store = FakeStore()
    publisher = WeightPublisher(torch.bfloat16, "gpu_memory", store=store)
    record = asyncio.run(publisher.publish(1, weights(1).items()))
    assert record is not None
    HostSharing().open(record.location.gpu_parts[0])[record.manifest[2].offset - record.manifest[0].offset] ^= 1
    with pytest.raises(WeightsError, match="'scale' is not what was published"):
        read(record)


@pytest.mark.usefixtures("on_host")
def test_gpu_logic_auto_takes_memory_of_gpus_unless_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: Any) -> str:
        store = FakeStore()
        asyncio.run(WeightPublisher(torch.bfloat16, store=store, **options).publish(1, weights(1).items()))
        return living(store)[0].transport if "policy" not in options else next(iter(store.values.values()))[0].transport

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "gpu_memory"
        adapter = {"policy": "a", "lora": LoRAConfig(rank=4)}
        assert chosen(**adapter) == chosen(**adapter, transport="gpu_memory") == "shared_memory"
    monkeypatch.setattr(HostSharing, "largest_by_default", 2 * 7000)
    with pytest.warns(UserWarning, match="shared memory carries the weights: .*too large"):
        assert chosen() == "shared_memory"
    assert chosen(transport="gpu_memory") == "gpu_memory"


def test_gpu_logic_asked_for_on_a_cpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    publisher = WeightPublisher(torch.bfloat16, "gpu_memory", store=FakeStore())
    with pytest.raises(WeightsError, match="'gpu_memory' is not possible: this process computes without CUDA; use"):
        asyncio.run(publisher.publish(1, weights(1).items()))
    assert not GPUMemory().suits()
    part = HostSharing().allocate(4096, 64)[1]
    with pytest.raises(WeightsError, match=r"memory of GPU-\d+, which .* set weight_transport='shared_memory'"):
        CUDASharing().open(part)


@pytest.mark.parametrize(
    ("statuses", "why"),
    [({}, ""), ({(1, 0): 5}, "GPU 1 cannot read the memory of GPU 0")],
)
def test_gpu_logic_gpus_that_do_not_reach_each_other_are_named(
    statuses: dict[tuple[int, int], int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetP2PStatus=lambda reader, owner, kind: statuses.get((reader, owner), operator.index(kind)),
        NVML_P2P_CAPS_INDEX_READ=(0,),  # as pynvml has it, whose call takes no tuple
        NVML_P2P_STATUS_OK=0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unreachable_gpus().startswith(why)
    assert bool(unreachable_gpus()) == bool(why)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert "MIG" in unreachable_gpus()


@pytest.mark.slow
def test_gpu_logic_memory_that_none_can_open_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    (bindings / "driver.py").write_text(Path(cuda_driver.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert why_not_opened(PATTERN + bytes(56), 3) == ""
    assert "found 0909090909090909 there and not 01" in why_not_opened(b"\x09" * 8 + bytes(56), 3)
    with (bindings / "driver.py").open("a") as file:
        file.write("refused.update(cuIpcOpenMemHandle='CUDA_ERROR_INVALID_HANDLE')\n")
    assert why_not_opened(bytes(64), 3).endswith("memory of the GPU: CUDA refused: CUDA_ERROR_INVALID_HANDLE")


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_gpu_logic_parts_are_whole_tensors_in_order(num_parts: int) -> None:
    manifest = build_manifest((name, shape, torch.bfloat16) for name, shape in SHAPES.items())
    parts = cut(manifest, num_parts)
    begins = {spec.offset for spec in manifest}
    assert len(parts) == num_parts
    assert all(begin in begins for begin, size in parts if size)
    assert [begin + size for begin, size in parts[:-1]] == [begin for begin, _ in parts[1:]]
    assert sum(size for _, size in parts) == sum(-(-spec.nbytes // 64) * 64 for spec in manifest)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a host with a GPU of 80,000 bytes, of which 70,000 are free. The CPU stands for it."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda_driver)
    properties = SimpleNamespace(uuid="abc")
    for name, value in {
        "is_available": lambda: True,
        "empty_cache": lambda: None,
        "synchronize": lambda _: None,
        "get_device_properties": lambda _: properties,
        "mem_get_info": lambda _: (70_000, 80_000),
        "memory_allocated": lambda _: 10_000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu, "unreachable_gpus", lambda: "")
    cuda_driver.refused.clear()
    cuda_driver.open_now.clear()
    return cuda_driver


@pytest.mark.usefixtures("driver")
def test_gpu_logic_memory_is_allocated_opened_and_given_back() -> None:
    sharing = CUDASharing(torch.device("cpu"))
    assert not sharing.why_not()
    memory, part = sharing.allocate(64, 4096)
    assert (part.begin, part.num_bytes, part.gpu, len(part.handle)) == (64, 4096, "GPU-abc", 64)
    assert memory.shape == (4096,)
    assert not memory.any(), "padding has checksums too"
    opened = sharing.open(part)
    memory[100] = 7
    assert opened[100] == 7
    assert opened.nbytes == 4096
    sharing.close(opened, owned=False)
    sharing.close(memory, owned=True)
    assert not any(cuda_driver.open_now.values())


def test_gpu_logic_what_cuda_refuses_is_said_and_leaves_nothing(driver: Any) -> None:
    sharing = CUDASharing(torch.device("cpu"))
    _, part = sharing.allocate(0, 64)
    for function, message in (
        ("cuMemAlloc", "0.1 MB of GPU memory are not free: CUDA refused: CUDA_ERROR"),
        ("cuIpcGetMemHandle", "shared: CUDA refused: CUDA_ERROR"),
    ):
        driver.refused[function] = "CUDA_ERROR"
        with pytest.raises(WeightsError, match=message):
            sharing.allocate(0, 100_000)
        driver.refused.clear()
    assert driver.open_now["allocated"] == 1
    driver.refused["cuIpcOpenMemHandle"] = "CUDA_ERROR_INVALID_HANDLE"
    with pytest.raises(WeightsError, match=r"GPU-abc, which .* cannot open \(CUDA refused: CUDA_ERROR_INVALID"):
        sharing.open(part)


def test_gpu_logic_auto_tries_it_in_another_process(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, tried = CUDASharing(torch.device("cpu")), list[bytes]()

    def opened(handle: bytes, device: int | None) -> str:
        del device
        tried.append(ctypes.string_at(int.from_bytes(handle[:8], "little"), 8))
        return "forbidden here"

    monkeypatch.setattr(gpu, "why_not_opened", opened)
    most = (70_000 - 8_000 + 10_000) // 5  # two versions, and four times as much of training, of which some is there
    assert sharing.why_not_by_default(most) == "forbidden here"
    assert tried == [PATTERN]
    assert driver.open_now["allocated"] == 0
    assert "of a GPU, which leaves training less than" in sharing.why_not_by_default(most + 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 80_000)  # also the moments
    assert sharing.why_not_by_default(16_000) == "forbidden here"
    driver.refused["cuIpcGetMemHandle"] = "CUDA_ERROR_NOT_SUPPORTED"
    assert "cannot be shared: CUDA refused: CUDA_ERROR_NOT_SUPPORTED" in sharing.why_not_by_default(most)
    assert driver.open_now["allocated"] == 0
