"""`Hosts`: where the processes of a run may be, as a recipe or `--hosts` says it; and hosts whose workers run already.

    ownloop run grpo --hosts trainer=n1:26600,n2:26600 --hosts generator=n3:26600
    hosts=WorkerHosts({"trainer": ("n1:26600", "n2:26600"), "generator": ("n3:26600",)})

A group has the name of a role. A role without a group of its own runs on the trainer's group if it is a trainer too (a
reference, a critic, a teacher), and otherwise on the controller's host.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from controller.hosts.connections import SETTINGS, Address, apply, certificates_folder, parse_address, tls_settings
from rl.checks import check_above_zero

Groups = Mapping[str, Sequence[Address]]
Tell = Callable[[str], None]
"""Is told, in a few words, what takes long."""


class Allocation(Protocol):
    """The hosts that a run has. It is made by `Hosts.allocation`, and has nothing before `workers` is called."""

    async def workers(self) -> Groups:
        """The workers of each group, once they listen.

        May be called again, after hosts were lost: what ended is started again where that is possible. Raises
        ValueError, with the hosts' names, if hosts cannot be had, or workers not be started on them.
        """
        ...

    async def revived(self) -> Groups:
        """The workers of each group; those that have ended are started again on the hosts that the run still has.

        Does not raise for hosts that stay lost. Raises `HostsOverError` if the run has no hosts any more.
        """
        ...

    async def stop(self) -> None:
        """Ends the workers that `workers` started, and gives the hosts back. Takes seconds. May be called again."""
        ...


@runtime_checkable
class Hosts(Protocol):
    """Groups of hosts for the roles of a run."""

    @property
    def certs(self) -> Path | None:
        """The folder of the controller's certificates; None for the usual one. See settings.py."""
        ...

    @property
    def uses_tls(self) -> bool:
        """Whether the controller needs a certificate."""
        ...

    @property
    def lost_after_s(self) -> float:
        """Seconds of silence after which a host is lost."""
        ...

    def allocation(self, tell: Tell) -> Allocation:
        """A new allocation, which starts nothing yet. `tell` hears what it waits for."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerHosts:
    """Hosts on which `ownloop worker` was started by hand, or by whatever starts services there."""

    groups: Mapping[str, Sequence[str]]
    """The addresses of the workers, `HOST:PORT` or, without TLS, `tcp://HOST:PORT`, by the name of the role."""
    certs: Path | None = None
    """The folder of the controller's certificates. None: that of OWNLOOP_CERTS, or ~/.config/ownloop/certs."""
    lost_after_s: float = 20.0
    """Seconds of silence after which a host is lost. Interruptions of less than half as long cost nothing."""

    def __post_init__(self) -> None:
        """Raises ValueError without a group, for what is no address, a host twice in a group, and TLS on some only."""
        if not self.groups:
            raise ValueError("hosts names no role; write for example trainer=HOST:PORT generator=HOST:PORT")
        check_above_zero(lost_after_s=self.lost_after_s)
        for group, addresses in self._parsed().items():
            if not addresses or len(set(addresses)) < len(addresses):
                raise ValueError(f"hosts of {group!r} are {list(self.groups[group])}; name at least one, and each once")
        if len(schemes := {address.scheme for group in self._parsed().values() for address in group}) > 1:
            raise ValueError(f"hosts have the schemes {', '.join(sorted(schemes))}; use TLS on all of them, or on none")

    @property
    def uses_tls(self) -> bool:
        """Whether the addresses have TLS: all have, or none."""
        return any(address.scheme == "tls" for group in self._parsed().values() for address in group)

    def allocation(self, tell: Tell) -> Allocation:
        """The workers, which run already and stay."""
        del tell
        return _RunningWorkers(self._parsed())

    def _parsed(self) -> dict[str, tuple[Address, ...]]:
        return {group: tuple(map(parse_address, hosts)) for group, hosts in self.groups.items()}


@dataclass(frozen=True, slots=True)
class _RunningWorkers:
    groups: Groups

    async def workers(self) -> Groups:
        return self.groups

    async def revived(self) -> Groups:
        return self.groups

    async def stop(self) -> None:
        pass


def parse_groups(words: Sequence[str]) -> WorkerHosts:
    """`trainer=n1:26600,n2:26600 generator=n3:26600` as `WorkerHosts`. Raises ValueError as that does."""
    groups: dict[str, tuple[str, ...]] = {}
    for word in words:
        role, equals, hosts = word.partition("=")
        if not (role and equals and hosts) or role in groups:
            raise ValueError(f"--hosts {word!r}: write each role once, as ROLE=HOST:PORT,HOST:PORT")
        groups[role] = tuple(hosts.split(","))
    return WorkerHosts(groups)


run_hosts: "ContextVar[Hosts | None]" = ContextVar("run_hosts", default=None)
"""The field `hosts` of the configuration of the run that is under way."""


def check_no_hosts_expected() -> None:
    """Raises ValueError if the run that is under way has hosts, for a loop that does not use them."""
    if run_hosts.get() is not None:
        raise ValueError(
            "the run has hosts, and its loop would start all processes on this one; have the loop pass them on: "
            "launch(model, config.trainer, config.generator, log_dir, config.hosts), or Launcher(log_dir, config.hosts)"
        )


def prepare(hosts: Hosts) -> None:
    """Sets what Monarch reads when it is imported, so this comes first. Raises ValueError without a certificate."""
    apply(SETTINGS)
    if hosts.uses_tls:
        from controller.hosts.certificates import own_certificates

        settings = tls_settings(own_certificates(certificates_folder(hosts.certs)))
        apply(settings, override=hosts.certs is not None)


@dataclass(slots=True)
class _Kept:
    tell: Tell
    allocations: list[tuple[Hosts, Allocation]] = field(default_factory=list[tuple[Hosts, Allocation]])


_KEPT: ContextVar[_Kept | None] = ContextVar("kept_allocations", default=None)


@dataclass(frozen=True, slots=True)
class Lease:
    """The use of an allocation."""

    allocation: Allocation
    is_kept: bool

    async def end(self) -> None:
        """Ends the allocation too, unless it is kept. May be called again."""
        if not self.is_kept:
            await self.allocation.stop()


@asynccontextmanager
async def kept_allocations(tell: Tell) -> AsyncGenerator[None]:
    """Keeps what is allocated in this block until its end. `tell` hears what an allocation waits for.

    A block within another leaves both to that one.

    A launcher leases an allocation for as long as its own block lasts. Within this block the allocation outlives the
    launcher, so that a run that restarts does not wait for its hosts again.
    """
    if _KEPT.get() is not None:
        yield
        return
    kept = _Kept(tell)
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        for _, allocation in kept.allocations:
            await allocation.stop()


def lease_of(hosts: Hosts) -> Lease:
    """The allocation of these hosts that is kept, or a new one."""
    kept = _KEPT.get()
    if kept is None:
        return Lease(hosts.allocation(teller()), is_kept=False)
    for known, allocation in kept.allocations:
        if known == hosts:
            return Lease(allocation, is_kept=True)
    allocation = hosts.allocation(kept.tell)
    kept.allocations.append((hosts, allocation))
    return Lease(allocation, is_kept=True)


def teller() -> Tell:
    """Tells the user of the run; prints where there is none."""
    kept = _KEPT.get()
    return _print if kept is None else kept.tell


def _print(text: str) -> None:
    print(text, flush=True)
