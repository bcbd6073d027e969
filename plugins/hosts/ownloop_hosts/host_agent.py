"""`HostAgent`: acts for the controller on another host. It knows, watches and ends the processes that run there.

Who talks to whom: the controller calls `beat` every second (see remote_host.py). The agent holds the controller's
lifeline; when that ends, the agent ends every process that its controller has started on this host, and itself. So
nothing outlives its controller, and a host that was cut off never continues old work.
"""

import asyncio
import contextlib
import hashlib
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import psutil
from monarch.actor import Actor, concurrent_endpoint, endpoint

from controller.processes.place import gpus_here
from controller.processes.rank_processes import RankProcesses
from ownloop_hosts.connections import hold
from ownloop_hosts.files import remove_unfinished
from ownloop_hosts.model_copies import ModelOffer, receive_model
from rl.system.disk import OwnedFolder
from rl.system.hardware import available_memory_bytes, host_identity

T = TypeVar("T")

CONTROLLER_VARIABLE = "OWNLOOP_CONTROLLER"
"""Set in every process that a controller starts on another host, to the controller's own id."""
_PACKAGES = ("torch", "torchmonarch", "torchstore", "torchtitan")
_CORE = ("rl", "trainer", "generator", "controller")
_TICK_S = 1.0
_MOST_LOG_BYTES = 1 << 18  # of one log in one answer
_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a controller has to know of a host before it starts anything there."""

    identity: str
    """`rl.system.hardware.host_identity` of its processes."""
    python: str
    versions: Mapping[str, str]
    """Versions by package, of all that must be equal on all hosts: Python and ownloop's own source are among them."""
    gpus: tuple[str, ...]
    """The names of its GPUs, as `CUDA_VISIBLE_DEVICES` has them."""
    gpu_kind: str
    """What the first GPU is; empty without one."""
    address: str
    """The IP address of the host on the network of its worker."""
    network: Mapping[str, str]
    """Variables for its processes: the network interface with that address."""
    log_folder: Path
    """Where its processes log."""
    clock: float
    """The time on the host, in seconds since the epoch."""
    memory_bytes: int
    """Memory that is available."""


@dataclass(frozen=True, slots=True)
class RankStates:
    """The processes of one mesh on this host. Ranks are counted on the host, from 0."""

    gone: tuple[int, ...]
    stopped_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Beat:
    """An answer to `HostAgent.beat`."""

    meshes: Mapping[str, RankStates]
    logs: Mapping[Path, bytes]
    """What was added to each log after the offset that was asked for."""


class HostAgent(Actor):
    """One runs on each host, in a process of its own that imports neither torch nor vLLM.

    It gives signs of life, and ends processes, while it works on questions.
    """

    def __init__(self, controller: str, lost_after_s: float) -> None:
        """`controller` is the id of the controller whose processes this agent may end."""
        self._controller = controller
        self._lost_after_s = lost_after_s
        self._meshes: dict[str, RankProcesses] = {}
        self._folder = OwnedFolder("ownloop-logs-")
        # One thread, because the order counts: a folder is removed after the last piece was written into it.
        self._questions = ThreadPoolExecutor(max_workers=1, thread_name_prefix="questions")

    @endpoint
    async def hold(self, lifeline: tuple[str, int]) -> None:
        """Ends what the controller has started on this host once its lifeline ends. Raises OSError without one."""
        await asyncio.to_thread(hold, lifeline, self._lost_after_s, self._end_everything)

    @endpoint
    async def facts(self, address: str) -> HostFacts:
        """What this host is. `address` is its IP address, as the controller knows it."""
        gpus = gpus_here() if any(Path(driver).exists() for driver in _GPU_DRIVERS) else ()
        return HostFacts(
            identity=host_identity(),
            python=sys.executable,
            versions=versions_here(),
            gpus=gpus,
            gpu_kind=_gpu_kind() if gpus else "",
            address=address,
            network=network_variables(interface_of(address)),
            log_folder=self._folder.path,
            clock=time.time(),
            memory_bytes=available_memory_bytes(),
        )

    @concurrent_endpoint
    async def ask(self, question: Callable[..., T], *args: object) -> T:
        """The answer of a function to a question about this host. It raises what the function raises.

        Questions are answered one after another, in the order in which they came.
        """
        return await asyncio.get_running_loop().run_in_executor(self._questions, partial(question, *args))

    @concurrent_endpoint
    async def receive_model(self, offer: ModelOffer) -> None:
        """Fetches a model, and answers questions meanwhile. Raises as `model_copies.receive_model`."""
        await asyncio.to_thread(receive_model, offer)

    @endpoint
    async def watch(self, mesh: str, pids: Sequence[int], log_files: Sequence[Path]) -> None:
        """Has `beat` report on these processes of a mesh."""
        self._meshes[mesh] = RankProcesses(pids, tuple(log_files), parent=os.getppid())

    @concurrent_endpoint
    async def beat(self, offsets: Mapping[Path, int]) -> Beat:
        """The state of all processes, and what they have logged after these offsets."""
        states: dict[str, RankStates] = {}
        for name, processes in self._meshes.items():
            processes.look(at_most_s=2 * _TICK_S)
            states[name] = RankStates(processes.gone, dict(processes.stopped_s))
        return Beat(states, {path: data for path, offset in offsets.items() if (data := _read(path, offset))})

    @concurrent_endpoint
    async def stacks(self, mesh: str, ranks: Sequence[int]) -> Mapping[int, str]:
        """The Python stacks of these ranks; see `RankProcesses.stacks`."""
        processes = self._meshes.get(mesh)
        return {} if processes is None else await processes.stacks_by_rank(ranks)

    @concurrent_endpoint
    async def kill(self, mesh: str) -> None:
        """Kills the processes of a mesh, and what they started."""
        if (processes := self._meshes.get(mesh)) is not None:
            processes.kill()

    @concurrent_endpoint
    async def ended(self, mesh: str, within_s: float) -> None:
        """Returns once the processes of a mesh are gone, or gives up. They are not reported on any more."""
        if (processes := self._meshes.pop(mesh, None)) is not None:
            processes.kill()
            await processes.ended(within_s)

    def _end_everything(self) -> None:
        """Ends every process of the controller, this one last."""
        end_processes_of(self._controller)
        remove_unfinished()
        os._exit(0)


def end_processes_of(controller: str) -> None:
    """Kills every process of this user that a controller started on this host, except this one."""
    mark = f"{CONTROLLER_VARIABLE}={controller}".encode()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def versions_here() -> Mapping[str, str]:
    """The versions that have to be equal on all hosts."""
    found = {package: version(package) for package in _PACKAGES}
    source = hash_of(_own_folders())
    return {**found, "python": platform.python_version(), "ownloop": f"{version('ownloop')} ({source})"}


def interface_of(address: str) -> str:
    """The network interface of this host that has an IP address; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""


def network_variables(interface: str) -> Mapping[str, str]:
    """What has gloo and NCCL use an interface, if there is one. Variables that this host has set itself stay."""
    # NCCL also takes interfaces whose names merely begin so, as eth10 does with eth1, unless "=" comes first.
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}", "TP_SOCKET_IFNAME": interface}
    return {name: os.environ.get(name, value) for name, value in names.items()} if interface else {}


def _own_folders() -> list[Path]:
    """The folders of ownloop's packages, and of the plug-ins that are installed here."""
    plugins = {each.name.replace("-", "_") for each in distributions() if each.name.startswith("ownloop-")}
    specs = [find_spec(name) for name in (*_CORE, *sorted(plugins))]
    return [Path(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or ()]


def hash_of(folders: Sequence[Path]) -> str:
    """A hash of the Python files in these folders: it differs between checkouts that have the same version."""
    digest = hashlib.blake2b(digest_size=6)
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{file.relative_to(folder)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _gpu_kind() -> str:
    import torch  # seconds, on hosts with GPUs only

    return torch.cuda.get_device_name(0)


def _read(path: Path, offset: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        return file.read(_MOST_LOG_BYTES)
    return b""
