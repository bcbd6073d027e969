"""`OtherHosts`: the hosts and GPUs that one mesh runs on.

Its processes are `RemoteRanks`. The hosts' agents do all that is done to them: a process id means nothing on another
host. A host that lacks the model gets a copy of it first.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import HostMesh, attach_to_workers

from controller.launching.hosts import Tell
from controller.processes.errors import HostLostError
from controller.processes.place import Place, gpu_env
from controller.processes.rank_processes import RankProcesses, stacks_text
from ownloop_hosts.connections import forwarded_env, own_address_towards
from ownloop_hosts.host_agent import CONTROLLER_VARIABLE
from ownloop_hosts.host_groups import teller
from ownloop_hosts.model_copies import ModelServer, check_same_model, model_files
from ownloop_hosts.remote_host import Host, awaited
from ownloop_hosts.run_files import HostFiles

_RELEASE_S = 3.0


@dataclass(frozen=True, slots=True)
class OtherHosts(Place):
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
    def has_gpu(self) -> bool:
        """Whether the ranks compute on GPUs."""
        return self.gpus[0] is not None

    @property
    def names(self) -> str:
        """The hosts, for errors."""
        return ", ".join(host.name for host in self.hosts)

    def host_mesh(self, mesh: str) -> HostMesh:
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

    @property
    def address(self) -> str:
        """Not the first host's name, which may mean 127.0.1.1 there."""
        return self.hosts[0].facts.address

    def files(self, num_ranks: int) -> HostFiles:
        """Those that ranks write on these hosts are collected."""
        return HostFiles(self.hosts, num_ranks)

    async def check_model_directory(self, model: Path) -> None:
        """Copies this model to the hosts that have none in the same place.

        Raises ValueError, with the host's name, if a host has another one there, or cannot take it.
        """
        files, tell = await asyncio.to_thread(model_files, model), teller()
        await self._on_each(lambda host: ensure_model(host, model, files, tell))

    async def check_there(self, check: Callable[..., object], *args: object) -> None:
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

    async def release(self, host_mesh: HostMesh) -> None:
        """Detaches from the hosts."""
        if all(host.lost is None for host in self.hosts):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(awaited(host_mesh.stop()), _RELEASE_S)

    def _host_index(self, rank: int, num_ranks: int) -> int:
        return rank // (num_ranks // self.num_hosts)


_STACKS_S = 6.0


class RemoteRanks(RankProcesses):
    """The processes of one mesh. Its ranks are spread evenly over hosts; the ranks of a host follow each other."""

    def __init__(self, mesh: str, hosts: Sequence[Host], pids: Sequence[int], log_files: tuple[Path, ...]) -> None:
        """`pids` are the ids of the processes on their hosts; `log_files` are the copies of their logs here."""
        super().__init__((), log_files)
        self.pids = tuple(pids)
        self.hosts = tuple(hosts)
        self._mesh = mesh
        self._per_host = len(log_files) // len(hosts)

    def look(self, at_most_s: float) -> None:
        """Takes over what the agents have told. Ranks on a lost host are gone."""
        del at_most_s  # the agents measure
        gone, self.stopped_s = list[int](), dict[int, float]()
        for index, host in enumerate(self.hosts):
            first = index * self._per_host
            if host.lost is not None:
                self.lost_host = f"host {host.name} is lost: {host.lost}"
                gone += range(first, first + self._per_host)
            elif (states := host.states.get(self._mesh)) is not None:
                gone += [first + rank for rank in states.gone]
                self.stopped_s |= {first + rank: seconds for rank, seconds in states.stopped_s.items()}
        self.gone = tuple(gone)

    def host_of(self, rank: int) -> Host:
        """The host that a rank runs on."""
        return self.hosts[rank // self._per_host]

    def name(self, rank: int | None) -> str:
        """How an error names a rank."""
        if rank is None and len(self.log_files) > 1:
            return f"a rank on {' or '.join(host.name for host in self.hosts)}"
        rank = rank or 0
        process = f"process {self.pids[rank]} on " if rank < len(self.pids) else "on "
        return f"rank {rank} ({process}{self.host_of(rank).name})"

    async def stacks(self, ranks: Iterable[int]) -> str:
        """The Python stacks of these ranks, as far as their hosts answer."""
        wanted = set(ranks)

        async def of(index: int, host: Host) -> dict[int, str]:
            first = index * self._per_host
            here = [rank - first for rank in sorted(wanted) if first <= rank < first + self._per_host]
            if here and host.lost is None:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_STACKS_S):
                        found = await host.agent.stacks.call_one(self._mesh, here)
                        return {first + rank: stack for rank, stack in found.items()}
            return {}

        found = await asyncio.gather(*(of(index, host) for index, host in enumerate(self.hosts)))
        return stacks_text({rank: stack for each in found for rank, stack in each.items()})

    async def fetch_states(self) -> None:
        """Brings states and the copies of logs up to date, as far as the hosts answer."""
        await asyncio.gather(*(host.refresh() for host in self.hosts))

    def kill(self) -> bool:
        """Has the agents kill every process. On a lost host its agent does so without being told."""
        hosts = [host for host in self.hosts if host.lost is None]
        for host in hosts:
            host.agent.kill.broadcast(self._mesh)
        return bool(hosts)

    async def ended(self, within_s: float) -> None:
        """Returns once every process on a host that answers is gone, or gives up."""

        async def on(host: Host) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(within_s + 1):
                    await host.agent.ended.call_one(self._mesh, within_s)

        await self.fetch_states()
        await asyncio.gather(*(on(host) for host in self.hosts if host.lost is None))
        for host in self.hosts:
            for log, copy in tuple(host.copies.items()):
                if copy in self.log_files:
                    del host.copies[log]


_TELL_S = 5.0
_POLL_S = 0.1
_SLOWEST_BYTES_PER_S = 1e6


async def ensure_model(host: Host, model: Path, files: Mapping[str, str], tell: Tell) -> None:
    """Returns once the host has the model, with these files, in the same place as this host.

    Raises ValueError if it has another one there, or cannot take it, and `HostLostError`.
    """
    async with host.models:  # two meshes on one host may need the same one
        if not await host.ask(model_files, model):
            await _copy_model(host, model, tell)
        await host.ask(check_same_model, model, files)


async def _copy_model(host: Host, model: Path, tell: Tell) -> None:
    server = ModelServer(model, own_address_towards(host.facts.address))
    total, started = server.offer.num_bytes, time.monotonic()
    within_s = 60 + total / _SLOWEST_BYTES_PER_S
    received = asyncio.create_task(host.receive_model(server.offer, within_s))
    tell(f"copying the model {model.name} to {host.name}: {total / 1e9:.2f} GB")
    told = started
    try:
        while not received.done():
            await asyncio.wait({received}, timeout=_POLL_S)
            if host.lost is not None:
                raise HostLostError(host.name, f"host {host.name} is lost: {host.lost}")
            if (now := time.monotonic()) > told + _TELL_S:
                told, sent = now, server.sent_bytes
                tell(
                    f"copying the model {model.name} to {host.name}: {sent / total:.0%} of {total / 1e9:.1f} GB, "
                    f"{sent / (now - started) / 1e6:.0f} MB/s"
                )
        await received
    finally:
        received.cancel()
        server.close()
