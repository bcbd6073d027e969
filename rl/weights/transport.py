"""How the bytes of a published version travel: what every transport does, and the table of those there are.

A transport has a sending end in every trainer rank and a receiving end in every generator rank. `trainer/push.py` and
`generator/` talk to these ends only, so a further transport is one file and one row of `TRANSPORTS`, or in a plug-in an
entry point of the group `ownloop.transports`. This module does not import torch, because configurations name transports
before any process starts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl.checks import unknown_name
from rl.system.plugins import named_by

if TYPE_CHECKING:  # they load torch
    import asyncio

    import torch

    from rl.weights.versions import Manifest, Store, TensorSpec, VersionIndex, VersionRecord

TRANSPORTS: Mapping[str, str] = {
    "gpu_memory": "rl.weights.gpu_memory:GPUMemory",
    "shared_memory": "rl.weights.shared_memory:SharedMemory",
    "torchstore": "rl.weights.store_transport:StoreTransport",
}
"""The transports of the core by name, as "module:class"."""


@cache
def transports() -> Mapping[str, str]:
    """Every transport by name, as "module:class". `auto` takes the first that suits and can carry the weights."""
    *preferred, last = TRANSPORTS.items()
    return dict((*preferred, *named_by("transports").items(), last))


def check_transport(name: str, transport: str) -> None:
    """Raises ValueError, with the `name` of what holds it, unless a transport is "auto" or one that there is."""
    known = ("auto", *transports())
    if transport not in known:
        raise unknown_name(name, transport, known, "transports")


@dataclass(frozen=True, slots=True)
class Shard:
    """What one trainer rank holds of one tensor."""

    name: str
    tensor: "torch.Tensor"
    """The tensor as the engine has it, in the engine's dtype; a DTensor if it is sharded."""
    local: "torch.Tensor | None"
    """The part that this rank sends; None if another rank sends the same values."""
    region: tuple[slice, ...]
    """Where `local` lies in the full tensor; empty if it is the full tensor."""


class Sender(Protocol):
    """The end of a transport in a trainer rank. All ranks call each method together."""

    async def prepare(self, manifest: "Manifest") -> None:
        """Called before the first version. Raises `WeightsError` on every rank if the transport cannot carry this."""
        ...

    async def send(self, record: "VersionRecord", shards: Iterable[Shard]) -> tuple["VersionRecord", bool]:
        """Sends this rank's shards. When it returns on every rank, generators can pull the version.

        `record` lacks only the fields that belong to the transport; they are filled in in the record that is returned.
        The second value, which counts on rank 0, says whether all tensors are known to be as in the version before.
        Iterating over `shards` raises ValueError if they do not fit the manifest. Raises on all ranks if one fails.
        """
        ...

    async def close(self, withdrawn: "Iterable[VersionRecord]") -> None:
        """Frees the memory of all versions. `withdrawn` are the versions of rank 0's index; no others are in use."""
        ...


@runtime_checkable
class WeightMemory(Protocol):
    """Memory of this process that holds every tensor of a version."""

    @property
    def parts(self) -> "tuple[torch.Tensor, ...]":
        """The memory that holds the tensors, in one piece or in several (uint8 [N] each)."""
        ...

    def tensor(self, spec: "TensorSpec") -> "torch.Tensor":
        """A view of one tensor."""
        ...


class Feed(Protocol):
    """A version that is being fetched in the event loop of the generator's rank 0."""

    async def fetch(self, done: "asyncio.Future[Any]") -> None:
        """Fetches until everything has arrived or `done` is done. Errors reach the thread that loads the weights."""
        ...


class Receiver(Protocol):
    """The end of a transport in a generator rank."""

    def feed(self, record: "VersionRecord", store: "Store") -> Feed | None:
        """What rank 0's event loop has to run while all ranks `open` the version; None if there is nothing to fetch."""
        ...

    def open(
        self, record: "VersionRecord", feed: Any
    ) -> "AbstractContextManager[WeightMemory | Iterator[tuple[str, torch.Tensor]]]":
        """The version's tensors, whole and unchanging while inside: all in memory at once, or one after the other.

        `feed` is what `feed` returned on rank 0, and None on the other ranks. Raises ValueError if the weights are out
        of reach, `UnknownVersionError` if the version is no longer kept, and `WeightsError` if it cannot be had; the
        iterator may raise `WeightsError` midway.
        """
        ...


class Transport(Protocol):
    """One way for weights to travel."""

    @property
    def fallback_notice(self) -> str:
        """How a warning begins that says that `auto` fell back on this transport."""
        ...

    @property
    def between_hosts(self) -> bool | None:
        """True if generators have to be on other hosts than the trainer, False if on the same, None for either."""
        ...

    @property
    def without_gpus(self) -> str:
        """The transport that carries an adapter, which is small, in place of this one; empty if this needs no GPUs."""
        ...

    def suits(self) -> bool:
        """Whether `auto` may take this transport in this process."""
        ...

    def sender(self, index: "VersionIndex", *, reader_timeout_s: float, asked: bool) -> Sender:
        """A trainer rank's end. A push waits at most `reader_timeout_s` for readers of the version that it replaces.

        `asked` says whether the user named this transport, so that it may take more than `auto` should.
        """
        ...

    def receiver(self, broadcast: Callable[..., Any]) -> Receiver:
        """A generator rank's end. `broadcast(x)` on rank 0 and `broadcast()` elsewhere return rank 0's `x`."""
        ...

    def current(self, record: "VersionRecord") -> "VersionRecord | None":
        """The version that can be pulled from where `record` says; None if there is none at this moment.

        Raises ValueError if the weights are out of reach, and `WeightsError` if the publisher is gone.
        """
        ...


def load_transport(name: str) -> Transport:
    """The transport of a name in `transports()`."""
    return resolve_name(transports()[name])()
