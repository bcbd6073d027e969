"""What is moved when, with devices that no machine needs to have: only their names matter here."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.engines.pytorch.engine_state import HostMemory, Offload, Part

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def moves() -> list[tuple[Part, str]]:
    return []


@pytest.fixture
def offload(moves: list[tuple[Part, str]]) -> Offload:
    return Offload(DEVICE, lambda part, device: moves.append((part, device.type)))


def test_parts_rest_where_they_were_sent_and_come_in_while_used(
    offload: Offload, moves: list[tuple[Part, str]]
) -> None:
    offload.rest(["model", "optimizer"], "cpu")
    offload.rest(["model"], "cpu")
    assert moves == [("model", "cpu"), ("optimizer", "cpu")]
    moves.clear()
    with offload.resident("model", "gradients"):
        assert (offload.device_of("model"), offload.device_of("optimizer")) == (DEVICE, HOST)
        with offload.resident("model", "optimizer"):
            pass
    assert moves == [("model", "cuda"), ("optimizer", "cuda"), ("optimizer", "cpu"), ("model", "cpu")]


def test_what_is_in_use_leaves_when_its_block_ends(offload: Offload, moves: list[tuple[Part, str]]) -> None:
    with offload.resident("model"):
        offload.rest(["model"], "cpu")
        assert not moves
    assert moves == [("model", "cpu")]
    offload.rest(["model"], "cuda")
    assert offload.device_of("model") == DEVICE


def test_parts_go_back_when_the_block_raises(offload: Offload) -> None:
    offload.rest(["model"], "cpu")
    with pytest.raises(ArithmeticError), offload.resident("model"):
        raise ArithmeticError
    assert offload.device_of("model") == HOST


def test_without_an_accelerator_nothing_moves(moves: list[tuple[Part, str]]) -> None:
    offload = Offload(HOST, lambda part, device: moves.append((part, device.type)))
    offload.rest(["model"], "cpu")
    with offload.resident("model"):
        pass
    offload.rest(["model"], "cuda")
    with offload.resident("model"):
        pass
    assert not moves
    with pytest.raises(ValueError, match="device is 'gpu'; it must be 'cpu' or 'cuda'"):
        offload.rest(["model"], "gpu")


@pytest.fixture
def one_rank(tmp_path: Path) -> Generator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.usefixtures("one_rank")
def test_a_dtensor_goes_through_pinned_memory_and_back() -> None:
    host, whole, places = HostMemory(), torch.randn(33, 5, device="cuda"), set[int]()
    for _ in range(3):
        sharded = distribute_tensor(whole, init_device_mesh("cuda", (1,)), [Shard(0)])
        held, turned, cast = [host.mover(HOST)(sharded), host.keep(whole.T), host.keep(whole.bfloat16())]
        torch.cuda.synchronize()
        assert isinstance(held, DTensor)
        local = held.to_local()
        assert local.is_pinned()
        assert torch.equal(local, whole.cpu())
        assert (turned.stride(), cast.dtype) == (whole.T.stride(), torch.bfloat16)
        assert torch.equal(turned.cuda(), whole.T)
        back = host.mover(DEVICE)(held)
        assert isinstance(back, DTensor)
        assert torch.equal(back.to_local(), whole)
        places.add(local.data_ptr())
    assert len(places) == 1, "memory is pinned once"
    kept = host.keep(whole)
    assert kept.is_pinned()
    del host
    assert not kept.is_pinned(), "CUDA would refuse to pin what comes to lie there next"
