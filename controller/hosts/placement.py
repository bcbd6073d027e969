"""`Placement`: the hosts and GPUs that one mesh runs on. Implements `controller.processes.place.Place`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch.actor import attach_to_workers

from controller.hosts.allocations import teller
from controller.hosts.host_agent import CONTROLLER_VARIABLE
from controller.hosts.host_models import ensure_model
from controller.hosts.model_copies import model_files
from controller.hosts.remote_host import Host
from controller.hosts.remote_ranks import RemoteRanks
from controller.hosts.settings import forwarded_env
from controller.processes.gpus import gpu_env
from controller.processes.place import free_port
from controller.processes.rank_processes import RankProcesses

_RELEASE_S = 3.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks of one mesh run: as many on each host."""

    controller: str
    """The id of the controller; see host_agent.py."""
    hosts: tuple[Host, ...]
    gpus: tuple[tuple[str, ...] | None, ...]
    """For each host, the names of the GPUs that its ranks may use; None for ranks that compute on the CPU."""

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.hosts)

    @property
    def other_hosts(self) -> Sequence[Host]:
        """The hosts."""
        return self.hosts

    @property
    def has_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.gpus[0] is not None

    @property
    def names(self) -> str:
        """The hosts, for errors."""
        return ", ".join(host.name for host in self.hosts)

    def host_mesh(self, mesh: str) -> Any:
        """A mesh of its own for each caller: Monarch can stop it only as a whole."""
        workers = [str(host.worker) for host in self.hosts]
        return attach_to_workers(ca="trust_all_connections", workers=workers, name=f"{mesh}_hosts")

    def coordinates(self, rank: int, num_ranks: int) -> Mapping[str, int]:
        """Monarch numbers ranks host by host."""
        per_host = num_ranks // self.num_hosts
        return {"hosts": rank // per_host, "gpus": rank % per_host}

    def env(self, rank: int, log_files: Sequence[Path]) -> Mapping[str, str]:
        """The GPUs of its host, the network interface that the other hosts see, and whose process it is."""
        index = self._host_index(rank, len(log_files))
        facts = self.hosts[index].facts
        own = {CONTROLLER_VARIABLE: self.controller, "VLLM_HOST_IP": facts.address}
        # Without an interface gloo takes the address of the host's own name, which on many hosts is 127.0.1.1.
        return {**own, **facts.network, **gpu_env(self.gpus[index]), **forwarded_env()}

    def log_file(self, rank: int, log_files: Sequence[Path]) -> Path:
        """A file on the rank's host; its lines are copied to `log_files[rank]` while it grows."""
        host = self.hosts[self._host_index(rank, len(log_files))]
        return host.facts.log_folder / log_files[rank].name

    async def processes(self, mesh: str, pids: Sequence[int], log_files: tuple[Path, ...]) -> RankProcesses:
        """Has the agents watch the processes, and their logs copied."""
        per_host = len(log_files) // self.num_hosts
        for rank, copy in enumerate(log_files):
            host, log = self.hosts[rank // per_host], self.log_file(rank, log_files)
            if not pids:
                copy.write_text(f"[on host {host.name}: {log}]\n")
                host.copies[log] = copy
        key = f"{mesh}/{'-'.join(map(str, pids))}"  # a mesh that is restarted has the same name
        if pids:
            watched = [
                host.agent.watch.call_one(
                    key,
                    pids[index * per_host : (index + 1) * per_host],
                    [self.log_file(rank, log_files) for rank in range(index * per_host, (index + 1) * per_host)],
                )
                for index, host in enumerate(self.hosts)
            ]
            for answer in watched:
                await answer
        return RemoteRanks(key, self.hosts, pids, log_files)

    async def master(self) -> tuple[str, int]:
        """The first host, by its address: its name may mean 127.0.1.1 there."""
        first = self.hosts[0]
        return first.facts.address, await first.ask(free_port, first.facts.address)

    async def check_model_directory(self, model: Path) -> None:
        """Copies this model to the hosts that have none in the same place.

        Raises ValueError, with the host's name, if a host has another one there, or cannot take it.
        """
        files, tell = await asyncio.to_thread(model_files, model), teller()
        await self._on_each(lambda host: ensure_model(host, model, files, tell))

    async def check_there(self, check: Callable[..., object], *args: Any) -> None:
        """Runs a check on every host. Raises its ValueError, with the host's name."""
        await self._on_each(lambda host: host.ask(check, *args))

    async def _on_each(self, work: Callable[[Host], Awaitable[object]]) -> None:
        """Does it for every host at the same time."""

        async def on(host: Host) -> None:
            try:
                await work(host)
            except ValueError as error:
                raise ValueError(f"on host {host.name}: {error}") from None

        done = await asyncio.gather(*map(on, dict.fromkeys(self.hosts)), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def release(self, host_mesh: Any) -> None:
        """Detaches from the hosts."""
        if all(host.lost is None for host in self.hosts):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_awaited(host_mesh.stop()), _RELEASE_S)

    def _host_index(self, rank: int, num_ranks: int) -> int:
        return rank // (num_ranks // self.num_hosts)


async def _awaited(awaitable: Awaitable[Any]) -> None:
    await awaitable
