"""`Cluster`: the hosts of a run while it runs: their agents, who is placed where, and what is left of a group.

Made by a `Launcher` before it starts anything, and stopped after everything has ended.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from controller.processes.errors import HostLostError
from controller.processes.place import GPUPool, Place
from generator.config import GeneratorConfig
from ownloop_hosts.connections import Address, forwarded_env, listening, own_address_towards
from ownloop_hosts.host_agent import versions_here
from ownloop_hosts.host_groups import HostGroups, Lease, lease_of
from ownloop_hosts.other_hosts import OtherHosts
from ownloop_hosts.remote_host import Host, HostError
from rl.system.hardware import host_identity
from trainer.config import TrainerConfig

if TYPE_CHECKING:  # the import would load torch
    from ownloop_hosts.weights.receivers import GeneratorHost, WeightReceivers

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
        self._generators: set[str] = set()  # the names of all, on whichever host
        self._gpus = {host: GPUPool(host.facts.gpus) for host in self.hosts}

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host once."""
        return tuple(dict.fromkeys(host for group in self.groups.values() for host in group))

    @classmethod
    async def connect(cls, hosts: HostGroups) -> "Cluster":
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
    async def _connect(cls, hosts: HostGroups, lease: Lease) -> "Cluster":
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

    @property
    def several(self) -> bool:
        """Whether weights have to get from the trainer's host to another one."""
        return bool(self.generator_hosts())

    def has_gpu(self, name: str, *, is_trainer: bool) -> bool | None:
        """Whether the hosts of a mesh have GPUs; None for the controller's. Raises ValueError if only some have."""
        hosts = self.group_of(name, is_trainer=is_trainer)
        return None if hosts is None else _have_gpus(name, hosts)

    def trainer(self, name: str, config: TrainerConfig) -> OtherHosts | None:
        """Where a trainer runs; None for the controller's host."""
        if (hosts := self.group_of(name, is_trainer=True)) is None:
            return None
        _refuse_turns(name, config)
        _have_gpus(name, hosts)  # only to raise
        return self.place(name, hosts, config.num_ranks, config.gpus)

    def generators(self, name: str, config: GeneratorConfig) -> list[OtherHosts] | None:
        """Where the replicas of a generator run, which take turns on the hosts, then its evaluator.

        None for the controller's host. If there are more hosts than replicas, a replica runs on several.
        """
        self._generators.add(name)
        if (hosts := self.group_of(name, is_trainer=False)) is None:
            return None
        _refuse_turns(name, config)
        each, left_over = divmod(len(hosts), config.num_replicas)
        if each > 0 and (left_over or config.tensor_parallel % each):
            raise ValueError(
                f"{name!r} has {len(hosts)} hosts, num_replicas {config.num_replicas} and tensor_parallel "
                f"{config.tensor_parallel}; set num_replicas to {len(hosts)} or more, or spread each replica: "
                f"num_replicas must divide {len(hosts)}, and the number of a replica's hosts its tensor_parallel"
            )
        return [self._generator(name, index, config) for index in range(config.num_copies)]

    async def replaced(self, place: Place, name: str, index: int, config: GeneratorConfig) -> OtherHosts:
        """The same place, or if one of its hosts is lost, one on hosts that are left. See `place`."""
        assert isinstance(place, OtherHosts)
        if all(host.lost is None for host in place.hosts):
            return place
        num_hosts = len(self.groups[name])
        await self.revive(name, least=num_hosts if config.num_replicas < num_hosts else 1)
        return self._generator(name, index, config)

    def _generator(self, name: str, index: int, config: GeneratorConfig) -> OtherHosts:
        """Where a replica runs now."""
        group = self.groups[name]
        count = max(1, len(group) // config.num_replicas)
        first = index * count % len(group)
        left = [host for host in group if host.lost is None] or group
        own = [host for host in left if host in group[first : first + count]] or [left[index % len(left)]]
        return self.place(f"{name}-{index}", own, config.tensor_parallel, config.gpus)

    def store(self) -> OtherHosts | None:
        """The first of the trainer's hosts, whose weights the store holds; None for the controller's."""
        group = self.group_of("trainer", is_trainer=True)
        return None if group is None else self.place("store", group[:1], 0)

    def receivers(self, log_dir: Path, store_name: str) -> "WeightReceivers":
        """A receiving process on every host that weights have to be sent to. It starts none yet."""
        from ownloop_hosts.weights.receivers import WeightReceivers

        return WeightReceivers(log_dir, self.generator_hosts, store_name)

    def generator_hosts(self) -> "list[GeneratorHost]":
        """The hosts that weights have to be sent to; none if trainer and generators are all on one."""
        trainers = self.group_of("trainer", is_trainer=True) or ()
        groups = [self.group_of(name, is_trainer=False) for name in sorted(self._generators or {"generator"})]
        hosts = tuple(dict.fromkeys(host for group in groups if group is not None for host in group))
        others = (*trainers, *hosts)
        if None in groups and others:
            return [*map(self.receiving, hosts), _receiving_here(others[0])]
        is_one_host = len(trainers) == 1 and set(trainers) == set(hosts)
        return [] if is_one_host else [*map(self.receiving, hosts)]

    def receiving(self, host: Host) -> "GeneratorHost":
        """One of the hosts, as one that weights are sent to."""
        from ownloop_hosts.weights.receivers import GeneratorHost

        return GeneratorHost(
            name=host.name,
            identity=host.facts.identity,
            address=host.facts.address,
            place=lambda: replace(self.place(f"weights-{host.name}", [host], 0), gpus=(host.facts.gpus,)),  # all
            is_lost=lambda: host.lost is not None,
        )

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


def _receiving_here(other: Host) -> "GeneratorHost":
    """This host, as one that weights are sent to from another."""
    from ownloop_hosts.weights.receivers import GeneratorHost

    return GeneratorHost(
        name="controller",
        identity=host_identity(),
        address=own_address_towards(other.facts.address),
        place=lambda: None,
        is_lost=lambda: False,
    )


def _have_gpus(name: str, hosts: Sequence[Host]) -> bool:
    """Whether the hosts of a mesh have GPUs. Raises ValueError if only some have."""
    without = [host.name for host in hosts if not host.facts.gpus]
    if without and len(without) < len(hosts):
        raise ValueError(
            f"hosts of {name!r} are {', '.join(host.name for host in hosts)}, and {', '.join(without)} has no GPU; all "
            "hosts of a mesh must have GPUs, or none"
        )
    return not without


def _refuse_turns(name: str, config: TrainerConfig | GeneratorConfig) -> None:
    """Raises ValueError for meshes that would take turns on GPUs of other hosts."""
    if config.placement == "colocated":
        raise ValueError(
            f"placement of {name!r} is 'colocated', which is for this host's GPUs; leave it out with hosts"
        )


class KnownWorkers:
    """The workers to which this process was connected before."""

    addresses: set[Address] = set()  # noqa: RUF012


def prepare_transport(workers: Sequence[Address], certs: Path | None) -> None:
    """Has Monarch listen where these workers can answer. Raises ValueError if it listens elsewhere already."""
    from monarch.actor import enable_transport

    if workers[0].scheme == "tls":
        from ownloop_hosts.certificates import own_certificates, own_name
        from ownloop_hosts.connections import certificates_folder

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
