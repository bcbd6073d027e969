"""Where the processes of a mesh run: what `Mesh.spawn` has to know of it. This host is one such place.

Other hosts are places of the plug-in `ownloop-hosts`. `GPUPool` gives out a host's GPUs. A GPU goes by the name that
`CUDA_VISIBLE_DEVICES` has for it: a number, a UUID ("GPU-...") or the name of a MIG instance ("MIG-..."). Where the
variable is not set, the names are the numbers of all GPUs.
"""

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from controller.processes.rank_processes import RankProcesses
from rl.system.hardware import is_cpu_build

if TYPE_CHECKING:  # the import would load Monarch
    from monarch.actor import HostMesh


class RunFiles:
    """Where the ranks of a mesh write what belongs into a folder of the controller, and where they read it.

    These ranks have the controller's folders, so every path is itself. Files of other hosts derive from it.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """The files of a mesh of so many ranks."""
        self.num_ranks = num_ranks

    async def to_write(self, path: Path) -> Path:
        """The path at which ranks are to write what is to be at `path`; `collect` brings it there.

        Raises ValueError if there is something at `path` that ownloop did not write, and if a host cannot write.
        """
        return Path(path).absolute()

    async def collect(self, path: Path, keep_last: int | None = None) -> None:
        """Brings what ranks have written, or are writing in the background, to `path`, which appears when it is whole.

        With `keep_last`, deletes older checkpoints beside it, as `TrainerHandle.save_checkpoint` says.
        Raises OSError if there is no room for it, and `HostLostError`.
        """

    @asynccontextmanager
    async def to_read(self, path: Path) -> AsyncGenerator[Sequence[Path]]:
        """Where each rank finds, while inside, what is at `path`. Raises OSError if a host has no room for it."""
        yield [Path(path).absolute()] * self.num_ranks


class Place:
    """Hosts that a mesh is spread over evenly. The ranks of one host are next to each other.

    This place is the host of the controller. Other hosts derive from it.
    """

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return 1

    @property
    def has_gpu(self) -> bool | None:
        """Whether the ranks compute on GPUs; None if torch has to be asked in this process."""
        return None

    @property
    def address(self) -> str:
        """Address of the host of rank 0, at which the other ranks find it. No other host can connect to this one's."""
        return "127.0.0.1"

    def host_mesh(self, mesh: str) -> "HostMesh":
        """Monarch's mesh of these hosts. Every call makes one, but for this host's."""
        from monarch.actor import this_host

        del mesh
        return this_host()

    def coordinates(self, rank: int, num_ranks: int) -> Mapping[str, int]:
        """Where Monarch's mesh of processes has a rank. On one host, ranks differ in their GPU alone."""
        del num_ranks
        return {"gpus": rank}

    def env(self, rank: int, log_files: Sequence[Path]) -> Mapping[str, str]:
        """What the process of a rank has in its environment because of where it runs."""
        del rank, log_files
        return {}

    def log_file(self, rank: int, log_files: Sequence[Path]) -> Path:
        """What a rank writes to on its host. `log_files` are what the controller reads."""
        return log_files[rank]

    async def processes(self, mesh: str, pids: Sequence[int], log_files: tuple[Path, ...]) -> RankProcesses:
        """The running processes. Before they run there are no `pids`."""
        del mesh
        return RankProcesses(pids, log_files)

    def files(self, num_ranks: int) -> RunFiles:
        """The files of a mesh with this many ranks here."""
        return RunFiles(num_ranks)

    async def check_model_directory(self, model: Path) -> None:
        """Copies a model's directory to the other hosts that have none in the same place.

        Raises ValueError, with the host's name, if a host has another one there, or cannot take it.
        """

    async def check_there(self, check: Callable[..., object], *args: object) -> None:
        """Runs a check of an importable module on every other host. Raises its ValueError, with the host's name."""

    async def release(self, host_mesh: "HostMesh") -> None:
        """Gives up what `host_mesh` returned, once the processes have ended. Returns within seconds."""


_VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


class GPUPool:
    """Gives out a host's GPUs in the order in which they are asked for."""

    def __init__(self, visible: Sequence[str]) -> None:
        """`visible` are the names of the GPUs that may be given out."""
        self._visible = tuple(visible)
        self._taken: dict[str, tuple[str, ...]] = {}
        self._colocated: set[str] = set()

    def take(
        self,
        name: str,
        num_ranks: int,
        gpus: Sequence[int | str] | None = None,
        *,
        num_replicas: int = 1,
        colocated: bool = False,
    ) -> tuple[str, ...] | None:
        """The GPUs that mesh `name` may use, one per rank: the next free ones, or those in `gpus`, even if taken.

        None on a host without GPUs: the mesh computes on the CPU. All meshes of one rank share a host's only GPU.
        Meshes that are `colocated` begin at the same GPU. `num_replicas` meshes share the ranks. Raises ValueError if
        too few GPUs are left, for GPUs that are not visible, and for several MIG instances in one mesh.
        """
        chosen = self._next_free(name, num_ranks, colocated) if gpus is None else self._named(name, num_ranks, gpus)
        if num_ranks > num_replicas and chosen and any(gpu.startswith("MIG-") for gpu in chosen):
            raise ValueError(
                f"{name!r} has {num_ranks // num_replicas} ranks and would use {', '.join(chosen)}; CUDA shows a "
                "process one MIG instance only, so a mesh on MIG must have one rank; otherwise give it whole GPUs"
            )
        if chosen:
            self._taken[name] = chosen
            self._colocated |= {name} if colocated else set()
        return chosen

    def give_back(self, name: str) -> None:
        """Frees the GPUs of a mesh that has ended."""
        self._taken.pop(name, None)

    def _named(self, name: str, num_ranks: int, gpus: Sequence[int | str]) -> tuple[str, ...]:
        names = tuple(map(str, gpus))
        if len(names) != num_ranks or not set(names) <= set(self._visible) or len(set(names)) < num_ranks:
            raise ValueError(
                f"gpus of {name!r} are {list(gpus)}; it needs {num_ranks} different ones, one per rank, of all that "
                f"are visible: {', '.join(self._visible) or 'none'}{_setting()}"
            )
        return names

    def _next_free(self, name: str, num_ranks: int, colocated: bool) -> tuple[str, ...] | None:
        if not self._visible:
            return None
        if len(self._visible) == num_ranks == 1:
            return self._visible
        others = [taken for user, taken in self._taken.items() if not (colocated and user in self._colocated)]
        free = [gpu for gpu in self._visible if not any(gpu in taken for taken in others)]
        if num_ranks > len(free):
            others = ", ".join(f"{user!r} has {', '.join(taken)}" for user, taken in self._taken.items())
            raise ValueError(
                f"{name!r} needs {num_ranks} GPUs, one per rank; {len(free)} of the {len(self._visible)} that are "
                f"visible{_setting()} are free{f': {others}' if others else ''}"
            )
        return tuple(free[:num_ranks])


def gpus_here(driver: Path = NVIDIA_DRIVER) -> tuple[str, ...]:
    """The names of the GPUs that the controller may use, found without initializing CUDA in this process.

    `driver` is a file that exists where there is a driver.
    """
    if is_cpu_build():
        return ()
    names = tuple(name.strip() for name in os.environ.get(_VARIABLE, "").split(","))
    if names[0].startswith("MIG-"):
        # torch can count MIG instances only by initializing CUDA, which would put a context on one of them.
        return names if driver.exists() else ()
    import torch  # takes seconds to load, which a mistake in a recipe should not have to wait for

    count = torch.cuda.device_count()  # by the driver's NVML; it stops at the first name that is no GPU, as CUDA does
    return names[:count] if _VARIABLE in os.environ else tuple(map(str, range(count)))


def gpu_env(gpus: Sequence[str] | None) -> Mapping[str, str]:
    """The environment of a mesh that may use these GPUs alone: rank i finds its GPU at index i. None hides nothing."""
    return {} if gpus is None else {_VARIABLE: ",".join(gpus)}


def _setting() -> str:
    """The variable's value in an error, if it is set."""
    return f" ({_VARIABLE} is {os.environ[_VARIABLE]!r})" if _VARIABLE in os.environ else ""
