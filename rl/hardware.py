"""What a CPU needs to compute fast: the right dtype and the right memory allocation."""

import ctypes
from pathlib import Path
from typing import Literal

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Intel and AMD; Intel; Arm


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Literal["bfloat16", "float32"]:
    """The faster dtype: bfloat16 on a processor that has instructions for it, according to Linux; float32 otherwise.

    Without these instructions bfloat16 matrix products run in scalar code: a step of SmolLM2-135M takes ten times as
    long as in float32.
    """
    return "bfloat16" if has_bfloat16(cpuinfo) else "float32"


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 instructions, by Linux's list of its features."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _BFLOAT16_FLAGS.isdisjoint(features.split())


def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether matrix products take less time in bfloat16 than in float32, by Linux's list of the processor's features.

    Intel's AVX-512 instructions for bfloat16 reach half of the float32 rate; its matrix units (AMX) a multiple of it.
    """
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return has_bfloat16(cpuinfo) and ("GenuineIntel" not in text or " amx_bf16" in text)


def cpu_malloc_env() -> dict[str, str]:
    """Environment variables for a process that computes on the CPU, to be set before it starts.

    A step allocates the same large tensors again and again. With these settings glibc keeps freed memory in the process
    instead of handing it back to the kernel, and puts it on huge pages.

    oneDNN and PyTorch each keep what they have compiled for a shape of a matrix product: 1,024 of them by default, some
    0.2 MB each. Rows of ever new lengths fill that; a row and its backward pass need two dozen.
    """
    return {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "LRU_CACHE_CAPACITY": "128",
    }


def hand_back_memory() -> None:
    """Hands memory that this process has freed back to the kernel. Does nothing in a C library that is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
