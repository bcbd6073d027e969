"""How long a run keeps the hosts that were allocated for it: over restarts, until it ends.

A launcher leases an allocation for as long as its block lasts. Within `kept_allocations` the allocation outlives the
launcher, so that a run that restarts does not wait for its hosts again; elsewhere it ends with the launcher.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from controller.hosts.host_groups import Allocation, Hosts, Tell


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
