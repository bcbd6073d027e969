"""The identity of this host, and how much memory it has left."""

import contextlib
from pathlib import Path


def host_identity() -> str:
    """Equal in two processes if one can open the other's descriptors: they share kernel and process namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"


def available_memory_bytes() -> int:
    """Memory that can still be allocated, by the kernel's estimate and this control group's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available
