"""How CUDA is called to share memory. A stand-in for cuda-bindings gives out memory of this process."""

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from rl.weights import gpu_sharing
from rl.weights.gpu_probe import PATTERN
from rl.weights.gpu_sharing import CUDASharing
from rl.weights.manifest import WeightsError


class Status(int):
    """A result of CUDA, whose name is made up."""

    @property
    def name(self) -> str:
        return f"cudaError{int(self)}"


class Handle:
    """64 bytes at an address."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._bytes)


class Runtime(NamedTuple):
    """What cuda-bindings calls `runtime`. A handle begins with the address of its memory."""

    memory: dict[int, Any]
    opened: list[int]
    fails: set[str]

    cudaIpcMemHandle_t = Handle  # noqa: N815

    def cudaMalloc(self, size: int) -> tuple[Status, int | None]:  # noqa: N802
        if "malloc" in self.fails:
            return Status(2), None
        held = ctypes.create_string_buffer(b"\xff" * size, size)
        self.memory[ctypes.addressof(held)] = held
        return Status(0), ctypes.addressof(held)

    def cudaFree(self, pointer: int) -> None:  # noqa: N802
        del self.memory[pointer]

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[Status, Handle | None]:  # noqa: N802
        if "share" in self.fails:
            return Status(801), None
        ctypes.memmove((handle := Handle()).getPtr(), pointer.to_bytes(8, "little"), 8)
        return Status(0), handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Status, int | None]:  # noqa: N802
        assert flags == 1, "GPUs that are not connected yet are connected then"
        if "open" in self.fails:
            return Status(217), None
        self.opened.append(pointer := int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little"))
        return Status(0), pointer

    def cudaIpcCloseMemHandle(self, pointer: int) -> None:  # noqa: N802
        self.opened.remove(pointer)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """On a host with a GPU of 80,000 bytes, which stands for the CPU."""
    runtime = Runtime({}, [], set())
    for name, module in {
        "cuda": ModuleType("cuda"),
        "cuda.bindings": ModuleType("b"),
        "cuda.bindings.runtime": runtime,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    properties = SimpleNamespace(uuid="abc", total_memory=80_000)
    for name, value in {
        "is_available": lambda: True,
        "device": lambda _: contextlib.nullcontext(),
        "empty_cache": lambda: None,
        "synchronize": lambda _: None,
        "get_device_properties": lambda _: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu_sharing, "unreachable_gpus", lambda: "")
    return runtime


def test_gpu_logic_memory_is_allocated_opened_and_given_back(runtime: Runtime) -> None:
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
    assert (runtime.memory, runtime.opened) == ({}, [])


def test_gpu_logic_what_cuda_refuses_is_said_and_leaves_nothing(runtime: Runtime) -> None:
    sharing = CUDASharing(torch.device("cpu"))
    _, part = sharing.allocate(0, 64)
    for what, message in (("malloc", "0.1 MB of GPU memory are not free: cudaError2"), ("share", "cudaError801")):
        runtime.fails.add(what)
        with pytest.raises(WeightsError, match=message):
            sharing.allocate(0, 100_000)
        runtime.fails.remove(what)
    assert len(runtime.memory) == 1
    runtime.fails.add("open")
    with pytest.raises(WeightsError, match=r"GPU-abc, which this process cannot open \(CUDA refused: cudaError217\)"):
        sharing.open(part)


def test_gpu_logic_auto_tries_it_in_another_process(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, tried = CUDASharing(torch.device("cpu")), list[bytes]()

    def opened(handle: bytes, device: int | None) -> str:
        del device
        tried.append(ctypes.string_at(int.from_bytes(handle[:8], "little"), 8))
        return "forbidden here"

    monkeypatch.setattr(gpu_sharing, "why_not_opened", opened)
    assert sharing.why_not_by_default(8000) == "forbidden here"
    assert tried == [PATTERN]
    assert runtime.memory == {}
    assert "more than a tenth of its memory" in sharing.why_not_by_default(8001)
    runtime.fails.add("share")
    assert "cannot be shared: cudaError801" in sharing.why_not_by_default(8000)
    assert runtime.memory == {}
