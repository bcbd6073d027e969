"""Weights to and from a GPU, with the CPU in its place: what is cast where, and what is called how often."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from rl.weights import copies
from rl.weights.buffer import WeightBuffer
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
    copies.copy(zip(destinations, sources, strict=True), batch_bytes=200)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(destinations, sources, strict=True))
    sizes = [[size for _, size in call] for call in calls]
    assert sizes == [[48, 80], [1600], [16, 32]]  # 200 bytes at a time, or one tensor that is larger


def test_gpu_logic_a_push_from_a_gpu_takes_that_way(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        store, tensors = FakeStore(), [(f"w{i}", torch.randn(50, 3 + i)) for i in range(4)]
        asyncio.run(WeightPublisher(torch.bfloat16, "shared_memory", store=store).publish(1, tensors))
        return read_buffer(living(store)[-1])

    expected = publish()
    assert not calls, "on the CPU, threads copy and cast"
    monkeypatch.setattr(copies, "on_gpu", lambda tensors: bool(list(tensors)))
    found = publish()
    assert [len(call) for call in calls] == [4]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("error", ["", "cudaErrorNotSupported"])
def test_gpu_logic_buffers_are_pinned_while_they_are_open(
    error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[tuple[Any, ...]] = []

    def call(function: str, *arguments: Any) -> str:
        log.append((function, *(getattr(argument, "value", argument) for argument in arguments)))
        return error

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", _NoDevice)
    monkeypatch.setattr(copies, "call_cuda", call)
    owner = WeightBuffer.create(4096)
    reader = WeightBuffer.open(owner.location)
    address = owner.parts[0].data_ptr()
    owner.pin()
    reader.pin()
    pinned, unpinned = "cudaHostRegister", "cudaHostUnregister"
    assert log == [(pinned, address, 4096, 1), (pinned, reader.parts[0].data_ptr(), 4096, 1 | 8)]  # and read-only
    for buffer in (owner, reader):
        buffer.close()
    told = capsys.readouterr().out
    if error:
        assert len(log) == 2
        assert "not pinned, which is slower: CUDA refused to pin 0.0 GB: cudaErrorNotSupported" in told
    else:
        assert log[2:] == [(unpinned, address), (unpinned, reader.parts[0].data_ptr())]
        assert not told


@pytest.mark.gpu
def test_weights_go_to_the_host_and_back_through_pinned_memory(capsys: pytest.CaptureFixture[str]) -> None:
    torch.zeros(1, device="cuda")
    buffer = WeightBuffer.create(1 << 22)
    buffer.pin()
    assert "not pinned" not in capsys.readouterr().out
    assert copies.pin(buffer.parts[0], writable=True), "it is pinned already"
    weights = torch.randn(1 << 20, device="cuda")
    assert not copies.call_cuda("cudaPeekAtLastError"), "torch would raise it"
    on_host = buffer.parts[0][: 1 << 21].view(torch.bfloat16)
    assert on_host.is_pinned()
    copies.copy([(on_host, weights)])
    back = torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16)
    copies.copy([(back, on_host)])
    assert torch.equal(back, weights.bfloat16())
    del on_host
    buffer.close()


class _NoDevice:
    """Stands for `torch.cuda.device`."""

    def __init__(self, index: int) -> None:
        assert index == 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_SCRIPT = """
import threading
import torch
from rl.weights.copies import Workers

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


@pytest.mark.parametrize(("share", "most"), [(0.0, 0.01), (0.01, 0.022), (0.1, 0.21), (0.9, None), (1.0, None)])
@pytest.mark.parametrize("num_elements", [3000 * 400, 300 * 401, 131_074, 70_001])
def test_changes_are_exact_and_few_bytes(share: float, most: float | None, num_elements: int) -> None:
    random = torch.Generator().manual_seed(7)

    def bits() -> torch.Tensor:  # of all numbers, not-a-numbers of every kind among them
        return torch.randint(-(1 << 15), 1 << 15, (num_elements,), generator=random, dtype=torch.int16)

    old = bits()
    new = torch.where(torch.rand(num_elements, generator=random) < share, bits(), old)
    changes = copies.changes_of(new.view(torch.uint8), old.view(torch.uint8))
    assert (changes is None) == (most is None)
    if changes is not None and most is not None:
        assert len(changes) <= most * 2 * num_elements
        copies.apply_changes(changes, old.view(torch.uint8))
        assert torch.equal(old, new)


def test_changes_of_other_memory_are_refused() -> None:
    changes = copies.changes_of(torch.ones(1 << 10, dtype=torch.uint8), torch.ones(1 << 10, dtype=torch.uint8))
    assert changes is not None
    with pytest.raises(ValueError, match="5 bytes of changes are no changes of 1024 bytes"):
        copies.apply_changes(torch.zeros(5, dtype=torch.uint8), torch.ones(1 << 10, dtype=torch.uint8))
    odd = torch.zeros(3, dtype=torch.uint8)
    assert copies.changes_of(odd, odd) is None
