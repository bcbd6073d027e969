"""Who runs where: gives the meshes of a `Launcher` their names, hosts and GPUs, before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from controller.hosts.connections import own_address_towards
from controller.hosts.host_groups import check_no_hosts_expected, prepare
from controller.processes.place import GPUPool, gpus_here
from generator.config import GeneratorConfig
from rl.system.hardware import host_identity
from rl.types import WeightTransport
from trainer.config import TrainerConfig

if TYPE_CHECKING:  # the imports would load Monarch
    from controller.handles.store import GeneratorHost
    from controller.hosts.cluster import Cluster
    from controller.hosts.host_groups import Hosts
    from controller.hosts.other_hosts import OtherHosts
    from controller.hosts.remote_host import Host


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one mesh runs."""

    gpus: tuple[str, ...] | None = None
    """GPUs of this host, one per rank. None: it computes on the CPU, or on `hosts`."""
    hosts: "OtherHosts | None" = None
    """Other hosts, with their GPUs."""

    async def check_model_directory(self, model: Path) -> None:
        """Raises ValueError unless every one of the other hosts has the model too."""
        if self.hosts is not None:
            await self.hosts.check_model_directory(model)

    async def check_trainer(self, config: TrainerConfig) -> None:
        """Raises ValueError unless the other hosts have the model, and the hardware that the options need."""
        await self.check_model_directory(config.model)
        if self.hosts is not None and (config.compile or config.float8 != "none"):
            from trainer.engines.model_check import check_model

            await self.hosts.check_there(check_model, config)


@dataclass(slots=True)
class _Shared:
    """What launchers share that run side by side."""

    cluster: "Cluster | None" = None
    gpus: GPUPool | None = None
    """The GPUs of this host."""
    generators: set[str] = field(default_factory=set[str])
    """The names of the generators."""


class Assignments:
    """The assignments of this host and, with a cluster, of others."""

    def __init__(self, beside: "Assignments | None" = None) -> None:
        """With `beside`, shares the hosts and GPUs of another launcher."""
        self._names: set[str] = set()
        self._hosts: _Shared = _Shared() if beside is None else beside._hosts

    @property
    def cluster(self) -> "Cluster | None":
        """The other hosts, if there are any."""
        return self._hosts.cluster

    async def connect(self, hosts: "Hosts | None") -> None:
        """Has roles run on other hosts from now on. None leaves them where they are.

        Raises ValueError for hosts that cannot be used, and for None in a run whose configuration has hosts.
        """
        if hosts is None:
            if self.cluster is None:
                check_no_hosts_expected()
            return
        prepare(hosts)  # before Monarch is imported
        from controller.hosts.cluster import Cluster

        self.use(await Cluster.connect(hosts))

    def use(self, cluster: "Cluster") -> None:
        """Has roles run on the hosts of a cluster from now on."""
        self._hosts.cluster = cluster

    async def disconnect(self) -> None:
        """Gives the other hosts up. Returns within seconds."""
        if self.cluster is not None:
            await self.cluster.stop()

    def give_back(self, *failed: str) -> None:
        """Frees this host's GPUs, once the meshes have ended; or the names and GPUs of meshes whose start `failed`."""
        self._names -= {*failed}
        for name in failed or self._names:
            if self._hosts.gpus is not None:
                self._hosts.gpus.give_back(name)

    def has_gpu(self, name: str, *, is_trainer: bool) -> bool | None:
        """Whether the hosts of a mesh have GPUs; None if it runs on this one. Raises ValueError if only some have."""
        hosts = None if self.cluster is None else self.cluster.group_of(name, is_trainer=is_trainer)
        return None if hosts is None else _have_gpus(name, hosts)

    def trainer(self, name: str, config: TrainerConfig) -> Assignment:
        """A trainer's assignment. Raises ValueError if the name is taken, for too few GPUs and for too few hosts."""
        self._take_name(name)
        hosts = None if self.cluster is None else self.cluster.group_of(name, is_trainer=True)
        if hosts is not None:
            assert self.cluster is not None
            _refuse_turns(name, config)
            _have_gpus(name, hosts)  # only to raise
            return Assignment(hosts=self.cluster.place(name, hosts, config.num_ranks, config.gpus))
        return Assignment(self._here(name, config, config.num_ranks, 1))

    def generators(self, name: str, config: GeneratorConfig) -> list[Assignment]:
        """The assignments of a generator's replicas, which take turns on the hosts, then its evaluator's.

        If there are more hosts than replicas, a replica runs on several. Raises as `trainer` does.
        """
        self._take_name(name)
        self._hosts.generators.add(name)
        num_ranks, num_copies = config.tensor_parallel, config.num_copies
        hosts = None if self.cluster is None else self.cluster.group_of(name, is_trainer=False)
        if hosts is not None:
            _refuse_turns(name, config)
            each, left_over = divmod(len(hosts), config.num_replicas)
            if each > 0 and (left_over or num_ranks % each):
                raise ValueError(
                    f"{name!r} has {len(hosts)} hosts, num_replicas {config.num_replicas} and tensor_parallel "
                    f"{num_ranks}; set num_replicas to {len(hosts)} or more, or spread each replica: num_replicas must "
                    f"divide {len(hosts)}, and the number of a replica's hosts its tensor_parallel"
                )
            return [self._remote_generator(name, index, config) for index in range(num_copies)]
        own = self._here(name, config, num_ranks * num_copies, num_copies)
        return [
            Assignment(None if own is None else own[index * num_ranks : (index + 1) * num_ranks])
            for index in range(num_copies)
        ]

    async def replaced(self, assignment: Assignment, name: str, index: int, config: GeneratorConfig) -> Assignment:
        """The assignment of a replica that is started again: the same, or if a host is lost, on hosts that are left.

        Raises ValueError if those have too few GPUs, and `HostLostError` if none is left.
        """
        hosts = () if assignment.hosts is None else assignment.hosts.hosts
        if self.cluster is None or all(host.lost is None for host in hosts):
            return assignment
        num_hosts = len(self.cluster.groups[name])
        await self.cluster.revive(name, least=num_hosts if config.num_replicas < num_hosts else 1)
        return self._remote_generator(name, index, config)

    def store(self) -> "OtherHosts | None":
        """The hosts of the store: the first of the trainer's, whose weights it holds. None for this host."""
        group = None if self.cluster is None else self.cluster.group_of("trainer", is_trainer=True)
        return None if self.cluster is None or group is None else self.cluster.place("store", group[:1], 0)

    def transport(self, chosen: WeightTransport) -> WeightTransport:
        """How weights reach the generators, which is what the user chose.

        Raises ValueError if that cannot work between these hosts.
        """
        one_host = not self.generator_hosts()
        if chosen in ("network", "nccl") and one_host:
            raise ValueError(f"weight_transport is {chosen!r}, and trainer and generator are on one host; use 'auto'")
        if chosen in ("shared_memory", "gpu_memory") and not one_host:
            raise ValueError(f"weight_transport is {chosen!r}, and trainer and generator are on several hosts")
        on_gpus = self.has_gpu("trainer", is_trainer=True)
        if chosen in ("gpu_memory", "nccl") and not (bool(gpus_here()) if on_gpus is None else on_gpus):
            raise ValueError(f"weight_transport is {chosen!r}, and the trainer's host has no GPU; use 'auto'")
        return chosen

    def generator_hosts(self) -> "list[GeneratorHost]":
        """The hosts that weights have to be sent to; none if trainer and generators are all on one."""
        cluster = self.cluster
        if cluster is None:
            return []
        trainers = cluster.group_of("trainer", is_trainer=True) or ()
        groups = [cluster.group_of(name, is_trainer=False) for name in sorted(self._hosts.generators or {"generator"})]
        hosts = tuple(dict.fromkeys(host for group in groups if group is not None for host in group))
        others = (*trainers, *hosts)
        if None in groups and others:
            return [*(receiving(cluster, host) for host in hosts), _receiving_here(others[0])]
        is_one_host = len(trainers) == 1 and set(trainers) == set(hosts)
        return [] if is_one_host else [receiving(cluster, host) for host in hosts]

    def _remote_generator(self, name: str, index: int, config: GeneratorConfig) -> Assignment:
        assert self.cluster is not None
        group = self.cluster.groups[name]
        count = max(1, len(group) // config.num_replicas)
        first = index * count % len(group)
        left = [host for host in group if host.lost is None] or group
        own = [host for host in left if host in group[first : first + count]] or [left[index % len(left)]]
        return Assignment(hosts=self.cluster.place(f"{name}-{index}", own, config.tensor_parallel, config.gpus))

    def _take_name(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"name is {name!r}, which is taken; taken are {', '.join(sorted(self._names))}")
        self._names.add(name)

    def _here(
        self, name: str, config: TrainerConfig | GeneratorConfig, num_ranks: int, num_replicas: int
    ) -> tuple[str, ...] | None:
        pool = self._hosts.gpus = self._hosts.gpus or GPUPool(gpus_here())
        colocated = config.placement == "colocated"
        try:
            return pool.take(name, num_ranks, config.gpus, num_replicas=num_replicas, colocated=colocated)
        except ValueError:
            self._names.discard(name)
            raise


def receiving(cluster: "Cluster", host: "Host") -> "GeneratorHost":
    """One of the other hosts, as one that weights are sent to."""
    from controller.handles.store import GeneratorHost

    return GeneratorHost(
        name=host.name,
        identity=host.facts.identity,
        address=host.facts.address,
        place=lambda: replace(cluster.place(f"weights-{host.name}", [host], 0), gpus=(host.facts.gpus,)),  # all
        is_lost=lambda: host.lost is not None,
    )


def _receiving_here(other: "Host") -> "GeneratorHost":
    """This host, as one that weights are sent to from another."""
    from controller.handles.store import GeneratorHost

    return GeneratorHost(
        name="controller",
        identity=host_identity(),
        address=own_address_towards(other.facts.address),
        place=lambda: None,
        is_lost=lambda: False,
    )


def _have_gpus(name: str, hosts: "Sequence[Host]") -> bool:
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
