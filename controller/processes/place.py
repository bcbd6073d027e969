"""Where the processes of a mesh run: what `Mesh.spawn` has to know of it. This host is one such place.

Other hosts are in controller/hosts/placement.py.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from controller.hosts.files import OtherHost
from controller.processes.rank_processes import RankProcesses

_LOOPBACK = "127.0.0.1"


class Place(Protocol):
    """Hosts that a mesh is spread over evenly. The ranks of one host are next to each other."""

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        ...

    @property
    def has_gpu(self) -> bool | None:
        """Whether the ranks compute on GPUs; None if torch has to be asked in this process."""
        ...

    @property
    def other_hosts(self) -> Sequence[OtherHost]:
        """These hosts, in the order of the ranks; none if this is the controller's."""
        ...

    def host_mesh(self, mesh: str) -> Any:
        """Monarch's mesh of these hosts. Every call makes one."""
        ...

    def coordinates(self, rank: int, num_ranks: int) -> Mapping[str, int]:
        """Where Monarch's mesh of processes has a rank."""
        ...

    def env(self, rank: int, log_files: Sequence[Path]) -> Mapping[str, str]:
        """What the process of a rank has in its environment because of where it runs."""
        ...

    def log_file(self, rank: int, log_files: Sequence[Path]) -> Path:
        """What a rank writes to on its host. `log_files` are what the controller reads."""
        ...

    async def processes(self, mesh: str, pids: Sequence[int], log_files: tuple[Path, ...]) -> RankProcesses:
        """The running processes. Before they run there are no `pids`."""
        ...

    async def master(self) -> tuple[str, int]:
        """Address and port at which the ranks find each other."""
        ...

    async def check_there(self, check: Callable[..., object], *args: Any) -> None:
        """Runs a check of an importable module on every other host. Raises its ValueError, with the host's name."""
        ...

    async def release(self, host_mesh: Any) -> None:
        """Gives up what `host_mesh` returned, once the processes have ended. Returns within seconds."""
        ...


class ThisHost:
    """The host of the controller."""

    num_hosts = 1
    has_gpu = None
    other_hosts = ()

    def host_mesh(self, mesh: str) -> Any:
        """The host itself."""
        from monarch.actor import this_host

        del mesh
        return this_host()

    def coordinates(self, rank: int, num_ranks: int) -> Mapping[str, int]:
        """Ranks differ in their GPU alone."""
        del num_ranks
        return {"gpus": rank}

    def env(self, rank: int, log_files: Sequence[Path]) -> Mapping[str, str]:
        """Nothing."""
        del rank, log_files
        return {}

    def log_file(self, rank: int, log_files: Sequence[Path]) -> Path:
        """The controller reads the log itself."""
        return log_files[rank]

    async def processes(self, mesh: str, pids: Sequence[int], log_files: tuple[Path, ...]) -> RankProcesses:
        """Children of this process."""
        del mesh
        return RankProcesses(pids, log_files)

    async def master(self) -> tuple[str, int]:
        """No other host can connect there."""
        return _LOOPBACK, free_port(_LOOPBACK)

    async def check_there(self, check: Callable[..., object], *args: Any) -> None:
        """There is no other host."""

    async def release(self, host_mesh: Any) -> None:
        """Nothing to give up."""


def free_port(address: str) -> int:
    """A free TCP port of this host."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        return int(server.getsockname()[1])
