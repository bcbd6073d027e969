"""Finds the published versions that can be pulled.

The index in TorchStore holds a record for each place where a version may lie. What lies there now is the transport's to
say, because some transports overwrite a place without telling TorchStore.
"""

from collections.abc import Iterable

from rl.weights.manifest import UnknownVersionError, VersionRecord, WeightsError, index_key
from rl.weights.transport import load_transport
from rl.weights.version_index import Store, is_missing


async def find_record(store: Store, version: int, policy: str | None = None) -> VersionRecord:
    """The record of a policy's version that can be pulled; None stands for the model itself.

    Raises `UnknownVersionError`, a ValueError, naming the versions that can be pulled, ValueError if the weights are
    out of reach, and `WeightsError` if TorchStore does not answer or the publisher is gone.
    """
    return find_version(await living_versions(store, policy), version)


async def living_versions(store: Store, policy: str | None = None) -> tuple[VersionRecord, ...]:
    """The records of a policy's versions that can be pulled, oldest first. Raises as `find_record` does."""
    try:
        announced: tuple[VersionRecord, ...] = await store.get(index_key(policy))
    except Exception as error:  # Monarch's own types if TorchStore is dead
        if not is_missing(error):
            raise WeightsError(f"TorchStore did not say which versions there are: {error}") from error
        announced = ()
    living = [now for record in announced if (now := load_transport(record.transport).current(record)) is not None]
    return tuple(sorted(living, key=lambda record: record.push_index))


def find_version(records: Iterable[VersionRecord], version: int) -> VersionRecord:
    """Picks a version's record; the newest if the version was published twice.

    Raises `UnknownVersionError` naming the versions that can be pulled.
    """
    by_version = {record.version: record for record in records}
    if version not in by_version:
        living = ", ".join(map(str, sorted(by_version))) or "none; nothing was pushed yet"
        raise UnknownVersionError(f"version {version} cannot be pulled; versions that can: {living}")
    return by_version[version]
