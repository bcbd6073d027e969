"""The hosts that receive weights over the network: their directory in the store, and what they are told.

Every generator host has one receiving process. The controller starts them and writes the directory; rank 0 of the
trainer reads it before every push, so a process that was replaced takes part from the next push on.
"""

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from rl.weights.buffer import BufferLocation
from rl.weights.links import LinkAddress
from rl.weights.messages import Part
from rl.weights.versions import Store, VersionRecord, WeightsError, is_missing

T = TypeVar("T")

LOOK_S = 1.0
RECEIVERS_KEY = "ownloop/weight_receivers"
"""TorchStore key of the directory, a tuple of `ReceivingHost`s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one receiving process has to do with one push."""

    id: str
    record: VersionRecord
    """Without a location."""
    publisher: str
    """The trainer. Versions of the same policy by another trainer are freed."""
    shards: bytes
    """`encode_shards` of what the trainer's ranks hold."""
    keep: BufferLocation | None
    """Where the newest published version lies on this host, which must not be overwritten."""
    reader_timeout_s: float
    incoming: tuple[tuple[int, LinkAddress], ...]
    """The link that the messages of each sending rank arrive on."""
    outgoing: LinkAddress | None
    """The link to the next host, which gets every message from this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A version that is complete on a host."""

    location: BufferLocation
    checksums: tuple[int, ...]
    unchanged: bool
    """Whether every byte is that of the version that this host had before."""
    not_forwarded: str | None
    """Why the next host did not get everything; None if it did, or if there is no next host."""


class Control(Protocol):
    """How a trainer talks to a receiving process. All methods raise `WeightsError`."""

    async def ping(self) -> None:
        """Returns if the process runs."""
        ...

    async def check_room(self, size_bytes: int, publisher: str) -> None:
        """Raises `WeightsError` if the host has less memory than this, with that of other trainers' versions."""
        ...

    async def begin(self, transfer: Transfer) -> None:
        """Locks a buffer against readers, makes the links that are missing and begins to receive."""
        ...

    async def finish(self, transfer_id: str, element_sums: tuple[int, ...] | None) -> Received:
        """Waits until everything has arrived and has been passed on, and makes the version visible.

        `element_sums` are those of every tensor, to be compared with what has arrived.
        """
        ...

    async def give_up_next(self, transfer_id: str) -> None:
        """Has `finish` wait no longer for the next host, which is gone."""
        ...

    async def abandon(self, transfer_id: str) -> None:
        """Ends a transfer that broke off, and all of its links. A buffer that is not complete holds no version."""
        ...

    async def drop(self, policy: str | None, publisher: str) -> None:
        """Frees a policy's memory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivingHost:
    """An entry of the directory."""

    name: str
    """For errors and warnings."""
    identity: str
    """Its `host_identity()`."""
    address: str
    """A name or an IP address at which trainer ranks and other generator hosts reach it."""
    port: int
    """Of its `Rendezvous`."""
    link_timeout_s: float
    """`LinkAddress.timeout_s` of every link to it."""
    process: str
    """Differs from that of every earlier process on this host."""
    control: Control


async def receiving_hosts(store: Store) -> tuple[ReceivingHost, ...]:
    """The directory; empty if no generator is on another host. Raises `WeightsError` if the store does not answer."""
    try:
        return await store.get(RECEIVERS_KEY)
    except Exception as error:  # Monarch's own types if TorchStore is dead
        if is_missing(error):
            return ()
        raise WeightsError(f"TorchStore did not say which generator hosts there are: {error}") from error


class Directory:
    """The directory as rank 0 of a trainer knows it."""

    def __init__(self, get_store: Callable[[], Awaitable[Store]]) -> None:
        """Nothing is read yet."""
        self._get_store = get_store
        self._processes: Collection[str] = ()
        self._read_at = 0.0

    async def read(self) -> tuple[ReceivingHost, ...]:
        """The hosts that there are now. Raises `WeightsError`."""
        self._read_at = time.monotonic()
        hosts = await receiving_hosts(await self._get_store())
        self._processes = {host.process for host in hosts}
        return hosts

    async def while_listed(self, host: ReceivingHost, call: Awaitable[T]) -> T:
        """The result of a call to a host that was read. Raises `WeightsError` once the controller has taken it off.

        Nobody tells a trainer that a host is lost, and a call to it would only end with its time limit.
        """
        asked = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
                if host.process not in self._processes:
                    raise WeightsError("it is gone")
                if time.monotonic() > self._read_at + LOOK_S:  # of many calls only one reads
                    await self.read()
            return asked.result()
        finally:
            asked.cancel()


def encode_shards(shards: Sequence[Sequence[Part]]) -> bytes:
    """What every rank holds, as bytes that a process decodes once."""
    return pickle.dumps(tuple(map(tuple, shards)))


@lru_cache(maxsize=4)
def decode_shards(encoded: bytes) -> tuple[tuple[Part, ...], ...]:
    """The argument of `encode_shards`."""
    return pickle.loads(encoded)
