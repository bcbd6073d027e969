"""Who runs where: gives the meshes of a `Launcher` their names, hosts and GPUs, before any process starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controller.launching.hosts import Cluster, Hosts, check_no_hosts_expected
from controller.processes.place import GPUPool, Place, gpus_here
from generator.config import GeneratorConfig
from rl.types import WeightTransport
from rl.weights.version import load_transport
from trainer.config import TrainerConfig

if TYPE_CHECKING:  # the import would load torch and Monarch
    from controller.handles.store import Receivers

_RANKS_PER_CORE = 8
"""The most processes of one mesh that may share a core."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one mesh runs."""

    gpus: tuple[str, ...] | None = None
    """GPUs of this host, one per rank. None: it computes on the CPU, or on `hosts`."""
    hosts: Place | None = None
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

    cluster: Cluster | None = None
    gpus: GPUPool | None = None
    """The GPUs of this host."""


class Assignments:
    """The assignments of this host and, with a cluster, of others."""

    def __init__(self, beside: "Assignments | None" = None) -> None:
        """Assigns nothing yet. With `beside`, it shares the hosts and GPUs of another launcher."""
        self._names: set[str] = set()
        self._hosts: _Shared = _Shared() if beside is None else beside._hosts

    async def connect(self, hosts: Hosts | None) -> None:
        """Has roles run on other hosts from now on. None leaves them where they are.

        Raises ValueError for hosts that cannot be used, and for None in a run whose configuration has hosts.
        """
        if hosts is not None:
            self.use(await hosts.connect())
        elif self._hosts.cluster is None:
            check_no_hosts_expected()

    def use(self, cluster: Cluster) -> None:
        """Has roles run on the hosts of a cluster from now on."""
        self._hosts.cluster = cluster

    async def disconnect(self) -> None:
        """Gives the other hosts up. Returns within seconds."""
        if self._hosts.cluster is not None:
            await self._hosts.cluster.stop()

    def give_back(self, *failed: str) -> None:
        """Frees this host's GPUs, once the meshes have ended; or the names and GPUs of meshes whose start `failed`."""
        self._names -= {*failed}
        for name in failed or self._names:
            if self._hosts.gpus is not None:
                self._hosts.gpus.give_back(name)

    def has_gpu(self, name: str, *, is_trainer: bool) -> bool | None:
        """Whether the hosts of a mesh have GPUs; None if it runs on this one. Raises ValueError if only some have."""
        cluster = self._hosts.cluster
        return None if cluster is None else cluster.has_gpu(name, is_trainer=is_trainer)

    def trainer(self, name: str, config: TrainerConfig) -> Assignment:
        """A trainer's assignment. Raises ValueError if the name is taken, for too few GPUs and for too few hosts."""
        self._take_name(name)
        if self._hosts.cluster is not None and (place := self._hosts.cluster.trainer(name, config)) is not None:
            return Assignment(hosts=place)
        return Assignment(self._here(name, config, config.num_ranks, 1))

    def generators(self, name: str, config: GeneratorConfig) -> list[Assignment]:
        """The assignments of a generator's replicas, which take turns on the hosts, then its evaluator's.

        If there are more hosts than replicas, a replica runs on several. Raises as `trainer` does.
        """
        self._take_name(name)
        if self._hosts.cluster is not None and (places := self._hosts.cluster.generators(name, config)) is not None:
            return [Assignment(hosts=place) for place in places]
        num_ranks, num_copies = config.tensor_parallel, config.num_copies
        own = self._here(name, config, num_ranks * num_copies, num_copies)
        return [
            Assignment(None if own is None else own[index * num_ranks : (index + 1) * num_ranks])
            for index in range(num_copies)
        ]

    async def replaced(self, assignment: Assignment, name: str, index: int, config: GeneratorConfig) -> Assignment:
        """The assignment of a replica that is started again: the same, or if a host is lost, on hosts that are left.

        Raises ValueError if those have too few GPUs, and `HostLostError` if none is left.
        """
        if self._hosts.cluster is None or assignment.hosts is None:
            return assignment
        return Assignment(hosts=await self._hosts.cluster.replaced(assignment.hosts, name, index, config))

    def store(self) -> Place | None:
        """The hosts of the weight store. None for this host."""
        return None if self._hosts.cluster is None else self._hosts.cluster.store()

    def receivers(self, log_dir: Path, store_name: str) -> "Receivers | None":
        """What receives weights on the hosts of generators; None if all is on this host."""
        return None if self._hosts.cluster is None else self._hosts.cluster.receivers(log_dir, store_name)

    def transport(self, chosen: WeightTransport) -> WeightTransport:
        """How weights reach the generators, which is what the user chose.

        Raises ValueError if that cannot work between these hosts.
        """
        if chosen == "auto":
            return chosen
        transport = load_transport(chosen)
        several = self._hosts.cluster is not None and self._hosts.cluster.several
        if transport.between_hosts not in (several, None):
            where = "several hosts" if several else "one host; use 'auto'"
            raise ValueError(f"weight_transport is {chosen!r}, and trainer and generator are on {where}")
        on_gpus = self.has_gpu("trainer", is_trainer=True)
        if transport.without_gpus and not (bool(gpus_here()) if on_gpus is None else on_gpus):
            raise ValueError(f"weight_transport is {chosen!r}, and the trainer's host has no GPU; use 'auto'")
        return chosen

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
            taken = pool.take(name, num_ranks, config.gpus, num_replicas=num_replicas, colocated=colocated)
            cores = len(os.sched_getaffinity(0))
            if taken is None and max(num_ranks, config.num_threads) > _RANKS_PER_CORE * cores:
                raise ValueError(
                    f"the {name} has {num_ranks} ranks, processes with num_threads {config.num_threads}, and this host "
                    f"has no GPU and {cores} cores; give it at most {_RANKS_PER_CORE * cores} of either"
                )
            return taken
        except ValueError:
            self._names.discard(name)
            raise
