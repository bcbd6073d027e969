"""`RemoteRanks`: the processes of a mesh on other hosts, with the interface of `RankProcesses`.

Everything goes through the hosts' agents: a process id means nothing on another host.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from controller.hosts.remote_host import Host
from controller.processes.rank_processes import RankProcesses, stacks_text

_STACKS_S = 6.0


class RemoteRanks(RankProcesses):
    """The processes of one mesh. Its ranks are spread evenly over hosts, those of one host next to each other."""

    def __init__(self, mesh: str, hosts: Sequence[Host], pids: Sequence[int], log_files: tuple[Path, ...]) -> None:
        """`pids` are those that the processes have on their hosts; `log_files` are the copies of their logs here."""
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
