"""How a published version is found: TorchStore has its record, or that of the buffer of shared memory that holds it.

A push into a buffer does not tell TorchStore, because that takes as long as copying a small model's weights. TorchStore
has one record for each buffer, from the first push into it; the buffer's sealed header says which version it holds now.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from rl.weights.buffer import held_version
from rl.weights.host import host_identity
from rl.weights.manifest import INDEX_KEY, UnknownVersionError, VersionRecord, WeightsError


class Store(Protocol):
    """What is needed of TorchStore; its `LocalClient` has it."""

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor, a DTensor's shard or any object that can be pickled."""
        ...

    async def get(self, key: str) -> Any:
        """Fetches what was put, a DTensor as the full tensor. Raises KeyError if nothing was."""
        ...

    async def delete(self, key: str) -> None:
        """Forgets a key."""
        ...


async def find_record(store: Store, version: int) -> VersionRecord:
    """The record of a version that can be pulled.

    Raises `UnknownVersionError`, a ValueError, naming the versions that can be pulled, ValueError if they lie out of
    reach, and `WeightsError` if TorchStore does not answer or the publisher is gone.
    """
    return find_version(await living_versions(store), version)


async def living_versions(store: Store) -> tuple[VersionRecord, ...]:
    """The records of all versions that can be pulled, oldest first. Raises as `find_record` does."""
    try:
        announced: tuple[VersionRecord, ...] = await store.get(INDEX_KEY)
    except Exception as error:  # a dead TorchStore raises what Monarch does
        if not isinstance(error, KeyError) or "Unable to locate" not in str(error):
            raise WeightsError(f"TorchStore did not say which versions there are: {error}") from error
        announced = ()
    living = [record for old in announced if (record := _as_of_now(old)) is not None]
    return tuple(sorted(living, key=lambda record: record.push_index))


def find_version(records: Iterable[VersionRecord], version: int) -> VersionRecord:
    """Picks a version's record; the newest where it was published twice.

    Raises `UnknownVersionError` naming the versions that can be pulled.
    """
    by_version = {record.version: record for record in records}
    if version not in by_version:
        living = ", ".join(map(str, sorted(by_version))) or "none; nothing was pushed yet"
        raise UnknownVersionError(f"version {version} cannot be pulled; versions that can: {living}")
    return by_version[version]


def check_within_reach(record: VersionRecord) -> None:
    """Raises ValueError for weights in the shared memory of another host."""
    if record.buffer is not None and record.host != host_identity():
        raise ValueError(
            "the weights lie in the shared memory of another host or container; the trainer needs"
            " weight_transport='torchstore' to reach this one"
        )


def _as_of_now(record: VersionRecord) -> VersionRecord | None:
    """The record of what its buffer holds by now; None while that is no whole version."""
    if record.buffer is None:
        return record
    check_within_reach(record)
    held = held_version(record.buffer)
    return replace(record, push_index=held[0], version=held[1]) if held is not None else None
