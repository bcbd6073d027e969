"""The index of published versions in TorchStore, and the three methods of TorchStore that weights need."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rl.weights.manifest import LIVING_VERSIONS, VersionRecord, WeightsError, index_key


class Store(Protocol):
    """A key-value store; TorchStore's `LocalClient` is one."""

    async def put(self, key: str, value: Any) -> None:
        """Stores a tensor, a DTensor's shard or any object that can be pickled."""
        ...

    async def get(self, key: str) -> Any:
        """Fetches a value, a DTensor as the full tensor. Raises KeyError if there is none."""
        ...

    async def delete(self, key: str) -> None:
        """Removes a key."""
        ...


class VersionIndex:
    """The publishing side of one policy's index: a tuple of `VersionRecord`s under its key, which rank 0 writes."""

    def __init__(self, get_store: Callable[[], Awaitable[Store]]) -> None:
        """`get_store` is called whenever the store is needed."""
        self.get_store = get_store
        self._records: tuple[VersionRecord, ...] = ()

    async def announce(self, record: VersionRecord) -> tuple[VersionRecord, ...]:
        """Adds a record to the index. Returns the records that drop out. Raises `WeightsError`."""
        store = await self.get_store()
        kept = (*self._records, record)[-LIVING_VERSIONS:]
        try:
            await store.put(index_key(record.policy), kept)
        except Exception as error:  # Monarch's own types if TorchStore is dead
            raise WeightsError(f"version {record.version} was not published: TorchStore failed: {error}") from error
        dropped = tuple(old for old in self._records if old not in kept)
        self._records = kept
        return dropped

    async def withdraw(self) -> tuple[VersionRecord, ...]:
        """Deletes the index. Returns the records that it had. Raises `WeightsError`."""
        records, self._records = self._records, ()
        if records:
            try:
                await (await self.get_store()).delete(index_key(records[0].policy))
            except Exception as error:  # Monarch's own types if TorchStore is dead
                raise WeightsError(f"versions were not withdrawn: TorchStore failed: {error}") from error
        return records


def is_missing(error: Exception) -> bool:
    """Whether `Store.get` raised this because there is no such key: TorchStore raises KeyError for its faults too."""
    return isinstance(error, KeyError) and "Unable to locate" in str(error)
