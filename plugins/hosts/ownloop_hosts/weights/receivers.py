"""The receiving processes of a run: one on every host that has generators, started and replaced by the controller.

What they do is in receiving_process.py. Trainers find them through their directory in the weight store, which the
controller keeps, and call them directly.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import torchstore
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, concurrent_endpoint

from controller.processes.mesh import Mesh
from controller.processes.place import Place
from ownloop_hosts.weights.links import LinkAddress
from ownloop_hosts.weights.receiving_process import ReceivingHost, ReceivingProcess
from rl.weights.store import RECEIVERS_KEY
from rl.weights.version import WeightsError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorHost:
    """A host that has generators."""

    name: str
    identity: str
    """The `host_identity()` of the receiver's host."""
    address: str
    """At which trainer ranks and the other generator hosts reach it."""
    place: Callable[[], Place | None]
    """Where to start a process on it; None stands for the controller's host."""
    is_lost: Callable[[], bool]


class WeightReceiver(Actor):
    """A `ReceivingProcess` in a process of its own."""

    def __init__(self) -> None:
        """Listens."""
        self._process = ReceivingProcess()

    @concurrent_endpoint
    async def listens(self) -> tuple[int, float]:
        """The port, and how long a link may carry nothing."""
        return self._process.port, self._process.link_timeout_s

    @concurrent_endpoint
    async def execute(self, method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What a method of the process returns."""
        return await asyncio.to_thread(method, self._process, *arguments)


class ActorCall:
    """Implements `Call` by a `WeightReceiver`. Travels through the store."""

    def __init__(self, actor: Any) -> None:
        """`actor` is the one rank."""
        self._actor = actor

    async def __call__(self, method: Callable[[ReceivingProcess, *Ts], T], *arguments: *Ts) -> T:
        """See `Call`."""
        try:
            return await self._actor.execute.call_one(method, arguments)
        except ActorError as error:
            raise error.exception from None
        except SupervisionError as error:
            raise WeightsError("its receiving process has ended") from error


@dataclass(frozen=True, slots=True)
class _Running:
    mesh: Mesh
    entry: ReceivingHost

    def has_died(self) -> bool:
        processes = self.mesh.processes
        processes.look(2 * _LOOK_S)
        return self.mesh.failure is not None or bool(processes.gone)


class WeightReceivers:
    """One receiving process on each generator host."""

    def __init__(self, log_dir: Path, hosts: Callable[[], Sequence[GeneratorHost]], store_name: str) -> None:
        """Their output goes to `<log_dir>/weights-<host>-0.log`. `hosts` returns the hosts of generators now.

        Trainers find the processes in the TorchStore that is named `store_name`.
        """
        self._log_dir = log_dir
        self._hosts = hosts
        self._store_name = store_name
        self._running: dict[str, _Running] = {}  # by the host's identity
        self._one_at_a_time = asyncio.Lock()
        self._looks: asyncio.Task[None] | None = None

    @property
    def are_complete(self) -> bool:
        """Whether every host that is not lost has a process that runs, as far as is known here."""
        wanted = {host.identity for host in self._hosts() if not host.is_lost()}
        return wanted == {identity for identity, each in self._running.items() if not each.has_died()}

    @property
    def lost(self) -> Sequence[Mesh]:
        """The processes on lost hosts if no host is left, so that a push would reach no generator."""
        hosts = self._hosts()
        return [each.mesh for each in self._running.values()] if hosts and all(h.is_lost() for h in hosts) else ()

    async def start(self) -> None:
        """Starts a process on every host, and replaces each one that dies. Raises `MeshError`."""
        await self.complete()
        self._looks = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Ends the processes. May be called again."""
        if self._looks is not None:
            self._looks.cancel()
            await asyncio.gather(self._looks, return_exceptions=True)
        running, self._running = self._running, {}
        await asyncio.gather(*(each.mesh.stop() for each in running.values()))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.complete()
            except Exception as error:  # the host may be about to be lost; a push names the hosts that it did not reach
                print(f"a receiving process could not be started: {error}", flush=True)

    async def complete(self) -> None:
        """Starts the processes that are missing or have died, drops the ones of lost hosts, and writes the directory.

        Raises `MeshError` if one cannot be started.
        """
        async with self._one_at_a_time:
            if not self.are_complete:
                await self._replace()

    async def _replace(self) -> None:
        wanted = {host.identity: host for host in self._hosts() if not host.is_lost()}
        if not wanted:
            return  # `lost` says so
        useless = [who for who, each in self._running.items() if who not in wanted or each.has_died()]
        await asyncio.gather(*(self._running.pop(who).mesh.stop() for who in useless))
        missing = [host for who, host in wanted.items() if who not in self._running]
        started = await asyncio.gather(*map(self._started, missing), return_exceptions=True)
        for host, outcome in zip(missing, started, strict=True):
            if isinstance(outcome, _Running):
                self._running[host.identity] = outcome
        store = await torchstore.client(self._store_name)
        await store.put(RECEIVERS_KEY, tuple(each.entry for each in self._running.values()))
        for outcome in started:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _started(self, host: GeneratorHost) -> _Running:
        name = f"weights-{host.name}"
        env = {"OMP_NUM_THREADS": "1"}
        mesh = await Mesh.spawn(name, WeightReceiver, num_ranks=1, env=env, log_dir=self._log_dir, hosts=host.place())
        try:
            ((port, link_timeout_s),) = await mesh.call("listens", [()])
        except BaseException:
            await mesh.stop()
            raise
        entry = ReceivingHost(
            name=host.name,
            identity=host.identity,
            links=LinkAddress(host.address, port, link_timeout_s),
            process=f"{host.identity}/{mesh.pids[0]}",
            call=ActorCall(mesh.actor(0)),
        )
        return _Running(mesh, entry)
