"""Opens memory of a GPU from a process of its own, which shows whether CUDA IPC works here: containers may forbid it.

`python -m rl.weights.gpu_probe HANDLE DEVICE` exits with 0 if it reads the pattern there, and says why not otherwise.
It does not load torch, so it takes a second.
"""

import ctypes
import subprocess
import sys
from importlib import import_module
from typing import Any

PATTERN = bytes(range(1, 9))
"""What the memory begins with."""

_TIMEOUT_S = 60.0


def why_not_opened(handle: bytes, device: int) -> str:
    """Why another process cannot open this memory on a GPU of the same number; empty if it can."""
    command = [sys.executable, "-m", "rl.weights.gpu_probe", handle.hex(), str(device)]
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
