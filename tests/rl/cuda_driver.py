"""The host in place of CUDA's driver, for tests and for processes that find this file as `cuda.bindings.driver`.

A handle holds the address of memory of this process, and may hold 8 bytes for which another process would look there.
"""

import ctypes
from collections import Counter
from typing import Any, ClassVar

CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY = 1, 8
refused: dict[str, str] = {}
"""The error of each function that fails."""
calls: list[tuple[Any, ...]] = []
open_now: Counter[str] = Counter()
"""What was not given back."""
_memory: dict[int, Any] = {}
NO_HANDLE = b"\0" * 64


class Status:
    """A `CUresult`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return bool(self.name)


class CUipcMemHandle:
    """64 bytes."""

    made: ClassVar[list["CUipcMemHandle"]] = []  # kept, as NVIDIA's are until their last reader

    def __init__(self, content: bytes = NO_HANDLE) -> None:
        self.content = ctypes.create_string_buffer(content, 64)
        self.made.append(self)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.content)


def __getattr__(function: str) -> Any:
    if not function.startswith("cu"):
        raise AttributeError(function)

    def call(*arguments: Any) -> tuple[Any, ...]:
        calls.append((function, *arguments))
        if function in refused:
            return Status(refused[function]), None
        result = _FUNCTIONS.get(function, lambda *_: None)(*arguments)
        return (Status(""),) if result is None else (Status(""), result)

    return call


def _allocate(size: int) -> int:
    memory = ctypes.create_string_buffer(b"\xff" * size, size)
    address = ctypes.addressof(memory)
    _memory[address] = memory
    open_now["allocated"] += 1
    return address


def _free(address: int) -> None:
    del _memory[address]
    open_now["allocated"] -= 1


def _open(handle: CUipcMemHandle, flags: int) -> int:
    assert flags == 1, "peers are opened when they are first used"
    open_now["opened"] += 1
    address = int.from_bytes(handle.content.raw[:8], "little")
    return address if address in _memory else handle.getPtr()


def _close(address: int) -> None:
    del address
    open_now["opened"] -= 1


def _copy(into: bytearray, address: int, size: int) -> None:
    into[:] = ctypes.string_at(address, size)


_FUNCTIONS: dict[str, Any] = {
    "cuDeviceGet": lambda index: index or 0,  # pyright: ignore
    "cuMemAlloc": _allocate,
    "cuMemFree": _free,
    "cuIpcGetMemHandle": lambda address: CUipcMemHandle(address.to_bytes(8, "little")),  # pyright: ignore
    "cuIpcOpenMemHandle": _open,
    "cuIpcCloseMemHandle": _close,
    "cuMemcpyDtoH": _copy,
}
