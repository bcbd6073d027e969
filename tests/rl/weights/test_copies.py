"""Weights to and from a GPU, with the CPU in its place: what is cast where, and what is called how often."""

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from rl.system.cuda import pin
from rl.weights import shared_memory
from rl.weights.memory import WeightBuffer
from tests.rl import cuda_driver
from tests.stores import FakeStore, living, read_buffer
from trainer.push import WeightPublisher

Calls = list[list[tuple[torch.dtype, int]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Dtypes and bytes of what each call sends over the link."""
    calls: Calls = []
    copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage]

    def noted(into: list[torch.Tensor], out_of: list[torch.Tensor], *, non_blocking: bool) -> None:
        assert non_blocking
        assert all(a.dtype == b.dtype for a, b in zip(into, out_of, strict=True)), "a cast would travel uncast"
        calls.append([(tensor.dtype, tensor.nbytes) for tensor in out_of])
        copy(into, out_of, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    return calls


def test_gpu_logic_weights_are_cast_and_travel_together(calls: Calls) -> None:
    sources = [torch.randn(n, 8) for n in (3, 5, 100, 1, 2)]
    destinations = [torch.zeros(source.shape, dtype=torch.bfloat16) for source in sources]
    shared_memory.copy(list(zip(destinations, sources, strict=True)), batch_bytes=200)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(destinations, sources, strict=True))
    sizes = [[size for _, size in call] for call in calls]
    assert sizes == [[48, 80], [1600], [16, 32]]  # 200 bytes at a time, or one tensor that is larger


def test_gpu_logic_a_slice_of_columns_does_not_slow_the_others(calls: Calls) -> None:
    sources = [torch.randn(3, 8), torch.randn(3, 9)[:, :8], torch.randn(4, 8)]
    destinations = [torch.zeros(source.shape) for source in sources]
    shared_memory.copy(list(zip(destinations, sources, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(destinations, sources, strict=True))
    assert [len(call) for call in calls] == [2, 1]


def test_gpu_logic_a_push_from_a_gpu_takes_that_way(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        store, tensors = FakeStore(), [(f"w{i}", torch.randn(50, 3 + i)) for i in range(4)]
        asyncio.run(WeightPublisher(torch.bfloat16, "shared_memory", store=store).publish(1, tensors))
        return read_buffer(living(store)[-1])

    expected = publish()
    assert not calls, "on the CPU, threads copy and cast"
    monkeypatch.setattr(shared_memory, "on_gpu", lambda tensors: bool(list(tensors)))
    found = publish()
    assert [len(call) for call in calls] == [4]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("error", ["", "CUDA_ERROR_NOT_SUPPORTED"])
def test_gpu_logic_buffers_are_pinned_while_they_are_open(
    error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", cuda_driver)
    monkeypatch.setattr(cuda_driver, "refused", {"cuMemHostRegister": error} if error else {})
    monkeypatch.setattr(cuda_driver, "calls", [])
    owner = WeightBuffer.create(4096)
    reader = WeightBuffer.open(owner.location)
    addresses = [buffer.parts[0].data_ptr() for buffer in (owner, reader)]
    owner.pin()
    reader.pin()
    for buffer in (owner, reader):
        buffer.close()
    pinned, unpinned = "cuMemHostRegister", "cuMemHostUnregister"
    log = [call for call in cuda_driver.calls if call[0] in (pinned, unpinned)]
    told = capsys.readouterr().out
    assert log[:2] == [(pinned, addresses[0], 4096, 1), (pinned, addresses[1], 4096, 1 | 8)]  # and read-only
    if error:
        assert len(log) == 2
        assert "more slowly than they could: 0.0 GB are not pinned: CUDA refused: CUDA_ERROR_NOT_SUPPORTED" in told
    else:
        assert log[2:] == [(unpinned, address) for address in addresses]
        assert not told


@pytest.mark.gpu
def test_weights_go_to_the_host_and_back_through_pinned_memory(capsys: pytest.CaptureFixture[str]) -> None:
    torch.zeros(1, device="cuda")
    buffer = WeightBuffer.create(1 << 22)
    buffer.pin()
    assert "not pinned" not in capsys.readouterr().out
    assert pin(buffer.parts[0], writable=True), "it is pinned already"
    weights = torch.randn(1 << 20, device="cuda")
    on_host = buffer.parts[0][: 1 << 21].view(torch.bfloat16)
    assert on_host.is_pinned()
    shared_memory.copy([(on_host, weights)])
    back = torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16)
    shared_memory.copy([(back, on_host)])
    assert torch.equal(back, weights.bfloat16())
    del on_host
    buffer.close()


_SCRIPT = """
import threading
import torch
from rl.weights.shared_memory import Workers

workers = Workers()
pairs = [(torch.zeros(2_000_000, dtype=torch.bfloat16), torch.rand(2_000_000)) for _ in range(4)]
workers.copy(pairs)
for copied, original in pairs:
    assert torch.equal(copied, original.bfloat16())

numbers, both = [], threading.Barrier(2)

def look():
    numbers.append(torch.get_num_threads())
    both.wait()

workers.run([look, look])
print(*numbers, torch.get_num_threads())
"""


@pytest.mark.seconds
def test_each_thread_uses_no_others_and_the_caller_keeps_its_own() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "2"]
