"""The transport between GPUs of one host: trainer ranks cast into memory of their GPUs, and generators copy from there.

No byte passes through the host. A version has header, checksums and locks as in a `WeightBuffer`, so what holds
for readers, writers and dead processes there holds here too. Each trainer rank has a part of the buffer on its own GPU,
whole tensors, and writes its shards of other tensors into the parts of others. A generator's ranks copy the slices they
need from all of them.

The memory is shared by CUDA IPC. A process opens memory of any GPU that its own can reach, also of one that
`CUDA_VISIBLE_DEVICES` hides from it, and addresses it as if it lay on its own GPU. Containers may forbid it, so `auto`
tries it first: `python -m rl.weights.gpu HANDLE DEVICE` exits with 0 if it reads a pattern in that memory, and says why
not otherwise. torch's own sharing is of no use here: a trainer's allocator has segments that grow, whose memory another
process opens only if it may trace the trainer, and it leaves a file behind where a process is killed.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from typing import Any, Self

import torch

from rl.system import cuda
from rl.system.ranks import all_gather, num_ranks
from rl.weights.memory import BufferLocation, GPUPart, WeightBuffer, is_kept
from rl.weights.shared_memory import Pair, SharedMemory, SharedMemoryReceiver, SharedMemorySender, copy
from rl.weights.store import VersionIndex
from rl.weights.version import (
    HEADER_BYTES,
    LIVING_VERSIONS,
    Manifest,
    PublisherGoneError,
    VersionRecord,
    WeightsError,
    buffer_size,
    leaves_room,
    raise_on_every_rank,
)

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_READ = 0  # NVML_P2P_CAPS_INDEX_READ; pynvml's own constant is a tuple, by a slip, which its call refuses


class CUDASharing:
    """How processes of one host share memory of its GPUs.

    It allocates past torch, whose allocator puts several tensors into one block and moves its blocks.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """By default, the device is the one of this rank."""
        self._device = device or cuda.own_device()

    def why_not(self) -> str:
        """Why this process cannot take part; empty if it can."""
        computes = torch.cuda.is_available() and torch.version.cuda is not None
        return "" if computes else "this process computes without CUDA"

    def why_not_by_default(self, num_bytes: int) -> str:
        """Why `auto` should not take `num_bytes` of this GPU's memory; empty if it may. See `leaves_room`."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        if not leaves_room(num_bytes, allocated=allocated, free=free, total=total):
            return (
                f"two versions take {num_bytes / 1e9:.1f} GB of a GPU, which leaves training less than it needs of "
                f"the {free / 1e9:.1f} GB that are free"
            )
        return unreachable_gpus() or self._why_not_opened()

    def allocate(self, begin: int, num_bytes: int) -> tuple[torch.Tensor, GPUPart]:
        """Allocates bytes of zeros (uint8 [num_bytes]) that others can open. Raises `WeightsError`."""
        torch.cuda.empty_cache()  # what torch has cached is not free for others
        try:
            cuda.enter(self._device)
            address = int(cuda.call("cuMemAlloc", num_bytes))
        except cuda.CUDAError as error:
            raise WeightsError(f"{num_bytes / 1e6:.1f} MB of GPU memory are not free: {error}") from error
        memory = _tensor(address, num_bytes, self._device).zero_()
        self.wait()
        try:
            handle = cuda.call("cuIpcGetMemHandle", address)
        except cuda.CUDAError as error:
            self.close(memory, owned=True)
            raise WeightsError(f"the GPU's memory cannot be shared: {error}") from error
        theirs = bytes(_tensor(handle.getPtr(), _HANDLE_BYTES, torch.device("cpu")).tolist())
        uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        return memory, GPUPart(begin, num_bytes, uuid, theirs, os.getpid())

    def open(self, part: GPUPart) -> torch.Tensor:
        """The memory that another process allocated. Raises `WeightsError` if this GPU cannot reach it."""
        why_not = self.why_not()
        try:
            if not why_not:
                cuda.enter(self._device)
                return _tensor(_opened(part.handle), part.num_bytes, self._device)
        except cuda.CUDAError as error:
            why_not = str(error)
        raise WeightsError(
            f"the weights lie in the memory of {part.gpu}, which this process cannot open ({why_not}); set"
            " weight_transport='shared_memory'"
        )

    def close(self, memory: torch.Tensor, *, owned: bool) -> None:
        """Frees memory that this process allocated and no other has opened, or closes memory that it opened."""
        self.wait()
        cuda.enter(self._device)
        cuda.call("cuMemFree" if owned else "cuIpcCloseMemHandle", memory.data_ptr())

    def wait(self) -> None:
        """Returns when everything that was queued on this process's GPU is done."""
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


class GPUMemory(SharedMemory):
    """A record's `location` is a `BufferLocation` with `gpu_parts`."""

    fallback_notice = "memory of GPUs carries the weights"
    without_gpus = "shared_memory"

    def suits(self) -> bool:
        """Only if there is CUDA."""
        return not CUDASharing().why_not()

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "GPUMemorySender":
        return GPUMemorySender(index, reader_timeout_s, asked=asked)

    def receiver(self, broadcast: Callable[..., Any]) -> SharedMemoryReceiver:
        del broadcast  # every rank copies by itself
        return SharedMemoryReceiver(GPUBuffer)


class GPUMemorySender(SharedMemorySender):
    """Casts this rank's shards into their places in memory of GPUs."""

    def __init__(self, index: VersionIndex, reader_timeout_s: float, *, asked: bool) -> None:
        super().__init__(index, reader_timeout_s)
        self._sharing = CUDASharing()
        self._asked = asked

    def _make_buffers(self, manifest: Manifest) -> list["GPUBuffer"]:
        """Every rank allocates its part of each buffer, then all open the parts of the others."""
        begin, num_bytes = cut(manifest, num_ranks())[self._rank]
        own: list[tuple[torch.Tensor, GPUPart]] = []
        buffers: list[GPUBuffer] = []
        problem: WeightsError | None = None
        try:
            self._check(LIVING_VERSIONS * num_bytes)
            for _ in range(LIVING_VERSIONS):
                if num_bytes:
                    own.append(self._sharing.allocate(begin, num_bytes))
                if self._rank == 0:
                    buffers.append(GPUBuffer.create(manifest[0].offset if manifest else HEADER_BYTES))
        except WeightsError as error:
            problem = error
        of_ranks = self._agree(problem, own, buffers)
        try:
            if self._rank > 0:
                buffers = [GPUBuffer.open(location, writable=True) for location in of_ranks[0][1]]
            for version, buffer in enumerate(buffers):
                parts = [parts[version] for parts, _ in of_ranks if parts]
                buffer.hold(parts, {part.handle: memory for memory, part in own})
        except WeightsError as error:
            problem = error
        self._agree(problem, own, buffers)
        return buffers

    def _agree(
        self, problem: WeightsError | None, own: list[tuple[torch.Tensor, GPUPart]], buffers: list["GPUBuffer"]
    ) -> list[tuple[list[GPUPart], list[BufferLocation]]]:
        """Every rank's parts and buffers. Frees everything and raises on all ranks if one has a problem."""
        found = [part for _, part in own], [buffer.location for buffer in buffers]
        try:
            return raise_on_every_rank(problem, value=found)
        except BaseException:
            for buffer in buffers:
                buffer.close()
            all_gather(None)  # memory may be freed once no rank has it open
            for memory, _ in own:
                self._sharing.close(memory, owned=True)
            raise

    def _check(self, num_bytes: int) -> None:
        why_not = self._sharing.why_not() or ("" if self._asked else self._sharing.why_not_by_default(num_bytes))
        if why_not:
            raise WeightsError(f"weight_transport='gpu_memory' is not possible: {why_not}; use 'shared_memory'")

    def _copy(self, pairs: Sequence[Pair]) -> None:
        copy(pairs)


def cut(manifest: Manifest, num_parts: int) -> list[tuple[int, int]]:
    """First byte and number of bytes of each part: whole tensors, as even as they allow. Parts may be empty."""
    first = manifest[0].offset if manifest else HEADER_BYTES
    end = buffer_size(manifest)
    ends = [spec.offset for spec in manifest[1:]] + [end]
    cuts = [first]
    for part in range(1, num_parts):
        wanted = first + (end - first) * part // num_parts
        cuts.append(max(cuts[-1], min(ends, key=lambda offset: abs(offset - wanted))))
    cuts.append(end)
    return [(begin, after - begin) for begin, after in itertools.pairwise(cuts)]


class GPUBuffer(WeightBuffer):
    """A buffer whose tensors lie in parts of GPU memory. The shared memory has only the header and the checksums."""

    _sharing: CUDASharing
    _opened: tuple[torch.Tensor, ...] = ()

    @classmethod
    def open(cls, location: BufferLocation, *, writable: bool = False) -> Self:
        """Also raises `WeightsError` if a part is out of this GPU's reach."""
        buffer = super().open(location, writable=writable)
        try:
            buffer.hold(location.gpu_parts, {})
        except BaseException:
            buffer.close()
            raise
        return buffer

    def hold(self, parts: Sequence[GPUPart], own: dict[bytes, torch.Tensor]) -> None:
        """Has the tensors lie in `parts`: parts that this process allocated, by their handles, and others.

        Raises `WeightsError` if one cannot be opened.
        """
        self._sharing = CUDASharing()
        memories: list[torch.Tensor] = []
        for part in parts:
            memory = own.get(part.handle)
            if memory is None:
                memory = self._sharing.open(part)
                self._opened += (memory,)
            memories.append(memory)
        self.parts = tuple(memories)
        self.begins = tuple(part.begin for part in parts)
        self.location = self.location._replace(gpu_parts=tuple(parts))

    def pin(self) -> None:
        """Does nothing: no tensor passes through the host's memory."""

    @contextlib.contextmanager
    def reading(self, record: VersionRecord) -> Generator[None]:
        """Also raises `PublisherGoneError`, and waits for the copies that were queued before it lets a writer in."""
        with super().reading(record):
            if not is_kept(self.location):
                raise PublisherGoneError("a process that published the weights is gone; they have to be pushed again")
            try:
                yield
            finally:
                self._sharing.wait()

    def close(self) -> None:
        """Closes what this process opened. Memory that it allocated lives as long as the process.

        CUDA forbids freeing memory that others have open, and a generator keeps it open from pull to pull.
        """
        for memory in self._opened:
            self._sharing.close(memory, owned=False)
        self._opened = ()
        super().close()


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
    for (i, reader), (j, owner) in itertools.permutations(enumerate(gpus), 2):
        if nvml.nvmlDeviceGetP2PStatus(reader, owner, _READ) != nvml.NVML_P2P_STATUS_OK:
            return f"GPU {i} cannot read the memory of GPU {j}"
    return ""


def _opened(handle: bytes) -> int:
    """Where memory of another process lies in this one. Raises `CUDAError`."""
    theirs = import_module("cuda.bindings.driver").CUipcMemHandle()
    _tensor(theirs.getPtr(), len(handle), torch.device("cpu")).copy_(
        torch.frombuffer(bytearray(handle), dtype=torch.uint8)
    )
    return int(cuda.call("cuIpcOpenMemHandle", theirs, _LAZY_PEER_ACCESS))


def _tensor(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory as a tensor that does not own it (uint8 [N])."""
    construct: Any = torch._C._construct_storage_from_data_pointer  # pyright: ignore
    return torch.empty(0, dtype=torch.uint8, device=device).set_(construct(address, device, num_bytes))


PATTERN = bytes(range(1, 9))
"""What the memory begins with."""
_TIMEOUT_S = 60.0


def why_not_opened(handle: bytes, device: int) -> str:
    """Why another process cannot open this memory on a GPU of the same number; empty if it can."""
    command = [sys.executable, "-m", "rl.weights.gpu", handle.hex(), str(device)]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"another process did not open memory of the GPU within {_TIMEOUT_S:g} s"
    if probe.returncode == 0:
        return ""
    return f"another process cannot open memory of the GPU: {probe.stderr.strip().rpartition(chr(10))[2]}"


def main(handle: str, device: str) -> None:
    """Exits with what went wrong, if anything."""
    found = bytearray(len(PATTERN))
    try:
        cuda.enter(torch.device("cuda", int(device)))
        cuda.call("cuMemcpyDtoH", found, _opened(bytes.fromhex(handle)), len(PATTERN))
    except cuda.CUDAError as error:
        raise SystemExit(str(error)) from None
    if bytes(found) != PATTERN:
        raise SystemExit(f"it found {found.hex()} there and not {PATTERN.hex()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
