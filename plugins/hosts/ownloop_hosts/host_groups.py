"""Groups of hosts for the roles of a run: what a recipe or `--hosts` says, and how long a run keeps its hosts.

    --hosts trainer=n1:26600,n2:26600 generator=n3:26600       workers that run already: `WorkerHosts`
    --hosts ssh trainer=n1,n2 generator=n3 port=26700
    --hosts slurm trainer=4 generator=4 partition=gpu gpus_per_node=8
    --hosts kubernetes trainer=2 generator=1 image=registry/ownloop:1

Options are the fields of the class that the first word names.

A group of hosts has the name of a role. A role without a group of its own runs on the group of the trainer if it is one
too (a reference, a critic, a teacher), and otherwise on the host of the controller.
"""

import dataclasses
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from controller.launching.hosts import Tell
from ownloop_hosts.connections import SETTINGS, Address, apply, certificates_folder, parse_address, tls_settings
from rl.checks import check_above_zero, did_you_mean

if TYPE_CHECKING:  # the import would load Monarch
    from ownloop_hosts.cluster import Cluster

Groups = Mapping[str, Sequence[Address]]


class Allocation(Protocol):
    """The hosts that a run has. It is made by `Hosts.allocation`, and has nothing before `workers` is called."""

    async def workers(self) -> Groups:
        """The workers of each group, once they listen.

        May be called again, after hosts were lost: what ended is started again where that is possible. Raises
        ValueError, with the hosts' names, if hosts cannot be had, or workers not be started on them.
        """
        ...

    async def revived(self) -> Groups:
        """The workers of each group. A worker that has ended is started again if the run still has its host.

        Does not raise for hosts that stay lost. Raises `HostsOverError` if the run has no hosts any more.
        """
        ...

    async def stop(self) -> None:
        """Ends the workers that `workers` started, and gives the hosts back. Takes seconds. May be called again."""
        ...


@runtime_checkable
class HostGroups(Protocol):
    """Groups of hosts for the roles of a run."""

    @property
    def certs(self) -> Path | None:
        """The folder of the controller's certificates; None for the usual one. See connections.py."""
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
        """A new allocation, which starts nothing yet. `tell` is called when it waits."""
        ...


class Connectable:
    """Implements `controller.launching.hosts.Hosts` for classes that are `HostGroups`."""

    __slots__ = ()

    async def connect(self: HostGroups) -> "Cluster":
        """Starts an agent on every host. Raises ValueError naming each host that cannot be used, and why."""
        prepare(self)  # before Monarch is imported
        from ownloop_hosts.cluster import Cluster

        return await Cluster.connect(self)

    def kept(self, tell: Tell) -> AbstractAsyncContextManager[None]:
        """See `kept_allocations`."""
        return kept_allocations(tell)

    @classmethod
    def from_words(cls, kind: str, words: Sequence[str]) -> Any:
        """The hosts that the words of `--hosts` after the kind name: roles, and fields of this class.

        Raises ValueError as the class does, for no role and for an unknown option.
        """
        return _with_options(cls, kind, words)


@dataclass(frozen=True, slots=True)
class WorkerHosts(Connectable):
    """Hosts on which `ownloop worker` runs already: started by hand or as a service."""

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

    @classmethod
    def from_words(cls, kind: str, words: Sequence[str]) -> "WorkerHosts":
        """See `parse_groups`."""
        del kind
        return parse_groups(words)

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


def prepare(hosts: HostGroups) -> None:
    """Sets what Monarch reads when it is imported, so this comes first. Raises ValueError without a certificate."""
    apply(SETTINGS)
    if hosts.uses_tls:
        from ownloop_hosts.certificates import own_certificates

        settings = tls_settings(own_certificates(certificates_folder(hosts.certs)))
        apply(settings, override=hosts.certs is not None)


@dataclass(slots=True)
class _Kept:
    tell: Tell
    allocations: list[tuple[HostGroups, Allocation]] = field(default_factory=list[tuple[HostGroups, Allocation]])


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
    """Keeps what is allocated in this block until its end. `tell` is called with what an allocation waits for.

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


def lease_of(hosts: HostGroups) -> Lease:
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
    """Shows messages where the run shows its progress, or prints them if no run is under way."""
    kept = _KEPT.get()
    return _print if kept is None else kept.tell


def _print(text: str) -> None:
    print(text, flush=True)


def _with_options(of_kind: type[Any], name: str, words: Sequence[str]) -> Any:
    """`of_kind`, which users call `name`, with the fields and roles that the words set."""
    fields = {field.name: field for field in dataclasses.fields(of_kind) if field.name != "env"}
    counts_hosts = fields.pop("groups").type == Mapping[str, int]
    groups: dict[str, object] = {}
    options: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals and text) or key in groups or key in options:
            raise ValueError(f"--hosts {name} {word!r}: write each role and each option once, as NAME=VALUE")
        if key in fields:
            options[key] = _value(f"--hosts {name} {key}", fields[key], text)
        elif "did you mean" in (near := did_you_mean(key, fields)):
            raise ValueError(f"--hosts {name} {key!r} is no option{near}")
        else:
            named = f"--hosts {name} {key}"
            groups[key] = int(_number(named, text, int)) if counts_hosts else tuple(text.split(","))
    if not groups:
        raise ValueError(f"--hosts {name} names no role; write for example trainer=... generator=...")
    needed = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in options]:
        raise ValueError(f"--hosts {name} needs {missing[0]}=...")
    return of_kind(groups, **options)


def _value(name: str, field: "dataclasses.Field[Any]", text: str) -> Any:
    """The value of a field that the text stands for."""
    if field.type is bool:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} is {text!r}; write yes or no")
        return text == "yes"
    if field.type in (int, float):
        return _number(name, text, int if field.type is int else float)
    return text if field.type is str else tuple(shlex.split(text))


def _number(name: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is no number") from None
