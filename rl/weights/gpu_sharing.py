"""Memory of a GPU that other processes of the host open: CUDA IPC.

A process opens memory of any GPU that its own can reach, also of one that `CUDA_VISIBLE_DEVICES` hides from it, and
addresses it as if it lay on its own GPU. Containers may forbid it, so it is tried once:
`python -m rl.weights.gpu_sharing HANDLE DEVICE` opens memory of a GPU from a process of its own. It exits with 0 if it
reads the pattern there, and says why not otherwise.
"""

import ctypes
import os
import subprocess
import sys
from importlib import import_module
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import torch

from rl.weights.versions import WeightsError

_HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_SUCCESS = 0


class GPUPart(NamedTuple):
    """A part of a weight buffer, in the memory of one GPU."""

    begin: int
    """The offset in the manifest's layout at which it begins."""
    num_bytes: int
    gpu: str
    """The GPU's UUID, for errors."""
    handle: bytes
    """With which other processes open the memory."""


class MemorySharing(Protocol):
    """How processes of one host share memory of its GPUs."""

    def why_not(self) -> str:
        """Why this process cannot take part; empty if it can."""
        ...

    def why_not_by_default(self, num_bytes: int) -> str:
        """Why `auto` should not take `num_bytes` of this GPU's memory; empty if it may."""
        ...

    def allocate(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, GPUPart]:
        """Allocates bytes of zeros (uint8 [num_bytes]) that others can open. Raises `WeightsError`."""
        ...

    def open(self, part: GPUPart) -> torch.Tensor:
        """The memory that another process allocated. Raises `WeightsError` if this GPU cannot reach it."""
        ...

    def close(self, memory: torch.Tensor, *, owned: bool) -> None:
        """Frees memory that this process allocated and nobody has opened, or closes what it opened."""
        ...

    def wait(self) -> None:
        """Returns when everything that was queued on this process's GPU is done."""
        ...


class CUDASharing:
    """Allocates past torch, whose allocator puts several tensors into one block and moves its blocks."""

    def __init__(self, device: torch.device | None = None) -> None:
        """By default, the device is the one of this rank."""
        self._device = device or torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    def why_not(self) -> str:
        if not torch.cuda.is_available() or torch.version.cuda is None:
            return "this process computes without CUDA"
        try:
            _cuda()
        except ImportError:
            return "the package cuda-bindings is not installed"
        return ""

    def why_not_by_default(self, num_bytes: int) -> str:
        """A tenth of the memory is left to it: the first push comes before training has taken what it needs."""
        limit = torch.cuda.get_device_properties(self._device).total_memory // 10
        if num_bytes > limit:
            return f"two versions take {num_bytes / 1e9:.1f} GB of a GPU, more than a tenth of its memory"
        return unreachable_gpus() or self._why_not_opened()

    def allocate(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, GPUPart]:
        device, cuda = self._device, _cuda()
        torch.cuda.empty_cache()  # what torch has cached is not free for others
        with torch.cuda.device(device):
            pointer = _checked(cuda.cudaMalloc(num_bytes), f"{num_bytes / 1e6:.1f} MB of GPU memory are not free")
            try:
                handle = _checked(cuda.cudaIpcGetMemHandle(pointer), "the GPU's memory cannot be shared")
            except WeightsError:
                cuda.cudaFree(pointer)
                raise
        memory = _tensor(int(pointer), num_bytes, device).zero_()
        torch.cuda.synchronize(device)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return memory, GPUPart(begin, num_bytes, uuid, ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))

    def open(self, part: GPUPart) -> torch.Tensor:
        if why_not := self.why_not():
            raise _out_of_reach(part, why_not)
        device, cuda = self._device, _cuda()
        handle = cuda.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), part.handle, _HANDLE_BYTES)
        with torch.cuda.device(device):
            try:
                pointer = _checked(cuda.cudaIpcOpenMemHandle(handle, _LAZY_PEER_ACCESS), "CUDA refused")
            except WeightsError as error:
                raise _out_of_reach(part, str(error)) from error
        return _tensor(int(pointer), part.num_bytes, device)

    def close(self, memory: torch.Tensor, *, owned: bool) -> None:
        with torch.cuda.device(memory.device):
            torch.cuda.synchronize(memory.device)
            _cuda().cudaFree(memory.data_ptr()) if owned else _cuda().cudaIpcCloseMemHandle(memory.data_ptr())

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def _why_not_opened(self) -> str:
        """Tries it with a little memory, because an error of a generator would come too late for another transport."""
        try:
            memory, part = self.allocate(0, 4096)
        except WeightsError as error:
            return str(error)
        memory[: len(PATTERN)] = torch.frombuffer(bytearray(PATTERN), dtype=torch.uint8)
        self.wait()
        try:
            return why_not_opened(part.handle, self._device.index)
        finally:
            self.close(memory, owned=True)


def unreachable_gpus() -> str:
    """Why GPUs of this host cannot all read each other's memory; empty if they can.

    It asks the driver about all of them, because a process does not know on which the generators are.
    """
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return "MIG instances do not read each other's memory"
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # the package or the driver's library is missing
        return f"the driver does not say which GPUs reach each other ({error})"
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if len(gpus) == 1:
        return "the host's only GPU needs its memory for trainer and generator"
    for (i, reader), (j, owner) in permutations(enumerate(gpus), 2):
        if nvml.nvmlDeviceGetP2PStatus(reader, owner, nvml.NVML_P2P_CAPS_INDEX_READ) != nvml.NVML_P2P_STATUS_OK:
            return f"GPU {i} cannot read the memory of GPU {j}"
    return ""


def _out_of_reach(part: GPUPart, why: str) -> WeightsError:
    return WeightsError(
        f"the weights lie in the memory of {part.gpu}, which this process cannot open ({why}); set"
        " weight_transport='shared_memory'"
    )


def _cuda() -> Any:
    return import_module("cuda.bindings.runtime")


def _checked(result: tuple[Any, Any], what: str) -> Any:
    """The value of a call. Raises `WeightsError` if it failed."""
    status, value = result
    if int(status) != _SUCCESS:
        raise WeightsError(f"{what}: {status.name}")
    return value


def _tensor(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of a GPU as a tensor that does not own it (uint8 [N])."""
    construct: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore
    return torch.empty(0, dtype=torch.uint8, device=device).set_(construct(pointer, device, num_bytes))


PATTERN = bytes(range(1, 9))
"""What the memory begins with."""

_TIMEOUT_S = 60.0


def why_not_opened(handle: bytes, device: int) -> str:
    """Why another process cannot open this memory on a GPU of the same number; empty if it can."""
    command = [sys.executable, "-m", "rl.weights.gpu_sharing", handle.hex(), str(device)]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"another process did not open memory of the GPU within {_TIMEOUT_S:g} s"
    if probe.returncode == 0:
        return ""
    return f"another process cannot open memory of the GPU: {probe.stderr.strip().rpartition(chr(10))[2]}"


def main(handle: str, device: str) -> None:
    """Exits with what went wrong, if anything."""
    cuda: Any = import_module("cuda.bindings.runtime")
    cuda.cudaSetDevice(int(device))
    shared = cuda.cudaIpcMemHandle_t()
    data = bytes.fromhex(handle)
    ctypes.memmove(shared.getPtr(), data, len(data))
    status, pointer = cuda.cudaIpcOpenMemHandle(shared, cuda.cudaIpcMemLazyEnablePeerAccess)
    found = ctypes.create_string_buffer(len(PATTERN))
    if status == cuda.cudaError_t.cudaSuccess:
        to_host = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        (status,) = cuda.cudaMemcpy(ctypes.addressof(found), pointer, len(PATTERN), to_host)
    if status != cuda.cudaError_t.cudaSuccess:
        raise SystemExit(status.name)
    if found.raw != PATTERN:
        raise SystemExit(f"it found {found.raw.hex()} there and not {PATTERN.hex()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
