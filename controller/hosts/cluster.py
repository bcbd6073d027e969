"""`Cluster`: the hosts of a run while it runs: their agents, who is placed where, and what is left of a group.

Made by a `Launcher` before it starts anything, and stopped after everything has ended.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from controller.hosts.connections import Address, forwarded_env, listening, own_address_towards
from controller.hosts.host_agent import versions_here
from controller.hosts.host_groups import Hosts, Lease, lease_of
from controller.hosts.other_hosts import OtherHosts
from controller.hosts.remote_host import Host, HostError
from controller.processes.errors import HostLostError
from controller.processes.place import GPUPool

_KNOWN_ANSWERS_S = 3.0  # that a worker which is not new has for its first answer; a host that is stopped gives none


class Cluster:
    """The hosts of one run. Use `connect`."""

    def __init__(
        self,
        groups: Mapping[str, tuple[Host, ...]],
        addresses: Mapping[Host, Address],
        controller: str,
        lost_after_s: float,
        lease: Lease | None = None,
    ) -> None:
        """`groups` are the hosts that answer, `addresses` the user's for each; `controller` is this process's id.

        The lease, if there is one, ends with the cluster.
        """
        self.groups = dict(groups)
        self._addresses = dict(addresses)
        self._controller = controller
        self._lost_after_s = lost_after_s
        self._lease = lease
        self._reviving = asyncio.Lock()
        self._gpus = {host: GPUPool(host.facts.gpus) for host in self.hosts}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host once."""
        return tuple(dict.fromkeys(host for group in self.groups.values() for host in group))

    @classmethod
    async def connect(cls, hosts: Hosts) -> "Cluster":
        """Starts an agent on every host, and checks that its versions equal this process's.

        A host that answered an earlier launcher of this process, and does not now, is left out of its group, unless
        the group would be empty. Raises ValueError naming each host that cannot be used, and why.
        """
        lease = lease_of(hosts)
        try:
            return await cls._connect(hosts, lease)
        except BaseException:
            await lease.end()
            raise

    @classmethod
    async def _connect(cls, hosts: Hosts, lease: Lease) -> "Cluster":
        groups = await lease.allocation.workers()
        wanted = tuple(dict.fromkeys(address for group in groups.values() for address in group))
        prepare_transport(wanted, hosts.certs)
        controller = uuid.uuid4().hex
        found = await asyncio.gather(
            *(connect_host(address, controller, hosts.lost_after_s) for address in wanted), return_exceptions=True
        )
        by_address = dict(zip(wanted, found, strict=True))
        running = {address: host for address, host in by_address.items() if isinstance(host, Host)}
        problems = {address: host for address, host in by_address.items() if isinstance(host, BaseException)}
        try:
            _raise_problems(groups, problems)
            if different := different_versions(tuple(running.values())):
                raise ValueError(f"all hosts need the same versions: {'; '.join(different)}")
        except BaseException:
            await asyncio.gather(*(host.stop() for host in running.values()))
            raise
        KnownWorkers.addresses |= running.keys()
        left = {name: tuple(running[each] for each in group if each in running) for name, group in groups.items()}
        addresses = {host: address for address, host in running.items()}
        return cls(left, addresses, controller, hosts.lost_after_s, lease)

    def group_of(self, role: str, *, is_trainer: bool) -> tuple[Host, ...] | None:
        """The hosts that a role runs on; None for the controller's."""
        return self.groups.get(role) or (self.groups.get("trainer") if is_trainer else None)

    def place(
        self, role: str, hosts: Sequence[Host], num_ranks: int, gpus: Sequence[int | str] | None = None
    ) -> OtherHosts:
        """Places the ranks of a mesh, as many on each host. `gpus` are the GPUs to use on each.

        Raises ValueError if the ranks cannot be spread evenly and for too few GPUs, and `HostLostError` if none of the
        hosts answers.
        """
        hosts = [host for host in hosts if host.lost is None] or list(hosts)
        if hosts[0].lost is not None:
            raise HostLostError(role, f"host {hosts[0].name} is lost: {hosts[0].lost}; no host is left for it")
        if num_ranks % len(hosts):
            raise ValueError(
                f"{role!r} has {num_ranks} ranks on the {len(hosts)} hosts {', '.join(host.name for host in hosts)}; "
                f"every host runs as many, so give it a multiple of {len(hosts)} ranks, or other hosts"
            )
        per_host = num_ranks // len(hosts)
        taken: list[tuple[str, ...] | None] = []
        for host in hosts:
            try:
                self._gpus[host].give_back(role)  # a generator that is replaced has the name of the old one
                taken.append(self._gpus[host].take(role, per_host, gpus))
            except ValueError as error:
                raise ValueError(f"on host {host.name}: {error}") from None
        return OtherHosts(self._controller, tuple(hosts), tuple(taken))

    async def revive(self, group: str, least: int = 1) -> None:
        """Tries to reach the lost hosts of a group again if fewer are left. Where that fails, they stay lost.

        Raises `HostsOverError` if that can never succeed.
        """
        async with self._reviving:
            if sum(host.lost is None for host in self.groups[group]) >= least:
                return
            groups = {} if self._lease is None else await self._lease.allocation.revived()
            by_name = {address.host: address for address in groups.get(group, ())}
            for old in [host for host in self.groups[group] if host.lost is not None]:
                self._addresses[old] = by_name.get(old.name, self._addresses[old])
                with contextlib.suppress(HostError):
                    new = await connect_host(self._addresses[old], self._controller, self._lost_after_s)
                    self._addresses[new], self._gpus[new] = self._addresses[old], GPUPool(new.facts.gpus)
                    await old.stop()
                    for name, hosts in self.groups.items():
                        self.groups[name] = tuple(new if host is old else host for host in hosts)

    async def stop(self) -> None:
        """Ends the agents. Returns within seconds, whether the hosts answer or not."""
        await asyncio.gather(*(host.stop() for host in self.hosts))
        if self._lease is not None:
            await self._lease.end()


class KnownWorkers:
    """The workers to which this process was connected before."""

    addresses: set[Address] = set()  # noqa: RUF012


def prepare_transport(workers: Sequence[Address], certs: Path | None) -> None:
    """Has Monarch listen where these workers can answer. Raises ValueError if it listens elsewhere already."""
    from monarch.actor import enable_transport

    if workers[0].scheme == "tls":
        from controller.hosts.certificates import own_certificates, own_name
        from controller.hosts.connections import certificates_folder

        name = own_name(own_certificates(certificates_folder(certs)), workers[0].host)
        here = str(Address("tls", name, 0))
    else:
        here = f"tcp://{own_address_towards(workers[0].host)}:0"
    try:
        enable_transport(here)
    except RuntimeError as error:
        raise ValueError(
            f"this process must listen on {here} for its hosts, but it has started processes without them, or for "
            f"others, before: {error}. Use another process"
        ) from None


async def connect_host(address: Address, controller: str, lost_after_s: float) -> Host:
    """The host at an address. Raises `HostError`, saying what to do, if it cannot be used."""
    try:
        worker = await asyncio.to_thread(listening, address)
    except ValueError as error:
        raise HostError(str(error)) from None
    if worker is None:
        last = address.port + 9
        raise HostError(
            f"{address.host}: no worker listens on its ports {address.port} to {last}; start one with "
            f"`ownloop worker --listen {address.host}:{address.port}`"
        )
    in_time = {"answers_within_s": _KNOWN_ANSWERS_S} if address in KnownWorkers.addresses else {}
    return await Host.connect(worker, controller, lost_after_s, forwarded_env(), **in_time)


def _raise_problems(groups: Mapping[str, Sequence[Address]], problems: Mapping[Address, BaseException]) -> None:
    """Raises for hosts that cannot be used, unless they could before and others are left."""
    unexpected = [error for error in problems.values() if not isinstance(error, HostError)]
    if unexpected:
        raise unexpected[0]
    new = [str(error) for address, error in problems.items() if address not in KnownWorkers.addresses]
    empty = [name for name, group in groups.items() if all(address in problems for address in group)]
    if new or empty:
        raise ValueError("; ".join(new or map(str, problems.values())))
    for error in problems.values():
        print(f"going on without a host: {error}", flush=True)


def different_versions(hosts: Sequence[Host]) -> list[str]:
    """Every version on a host that is another one than here."""
    return [
        f"{host.name} has {package} {host.facts.versions.get(package)}, and the controller {version}"
        for package, version in versions_here().items()
        for host in hosts
        if host.facts.versions.get(package) != version
    ]
