"""What this process asks of CUDA's driver itself, by NVIDIA's bindings, which torch's CUDA build requires.

Torch calls CUDA's runtime, which keeps an error until a later call raises it. The driver keeps none.
"""

import os
from importlib import import_module
from typing import Any

import torch


class CUDAError(RuntimeError):
    """CUDA refused a call, for the reason that the message names."""


def own_device() -> torch.device:
    """The GPU of this rank."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def call(function: str, *arguments: object) -> Any:
    """What a function of CUDA's driver returns. Raises `CUDAError` with the name of its error."""
    status, *results = getattr(import_module("cuda.bindings.driver"), function)(*arguments)
    if status:
        raise CUDAError(f"CUDA refused: {status.name}")
    return results[0] if results else None


def enter(device: torch.device) -> None:
    """Has the driver's calls of this thread concern a GPU, as torch's calls for this GPU do. Raises `CUDAError`."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device.index)))


def pin(data: torch.Tensor, *, writable: bool) -> str:
    """Pins the host memory under a tensor of bytes. Returns why that failed, empty if it did not.

    To be called in a process that uses a GPU. Unpinned memory is as right, but several times as slow.
    """
    driver = import_module("cuda.bindings.driver")
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else driver.CU_MEMHOSTREGISTER_READ_ONLY)
    try:
        enter(own_device())
        call("cuMemHostRegister", data.data_ptr(), data.nbytes, flags)
    except CUDAError as error:
        return f"{data.nbytes / 1e9:.1f} GB are not pinned: {error}"
    return ""


def unpin(data: torch.Tensor) -> None:
    """Undoes `pin`, which must come before the memory is unmapped. Raises `CUDAError`."""
    enter(own_device())
    call("cuMemHostUnregister", data.data_ptr())
