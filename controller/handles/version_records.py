"""The controller's own copy of version records, which saves its generators a lookup in TorchStore."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import would load torch
    from rl.weights.version import VersionRecord

_NUM_KEPT = 2  # as many versions as the trainer keeps; older ones cannot be pulled


class VersionRecords:
    """Records of the newest versions of every policy. Trainers' handles add them, and generators' look them up.

    TorchStore remains the directory: a version that is not found here is looked up there.
    """

    def __init__(self) -> None:
        """Starts without records."""
        self._records: dict[str | None, tuple[VersionRecord, ...]] = {}

    def add(self, record: "VersionRecord") -> None:
        """Adds the record of a version that was just published."""
        self._records[record.policy] = (*self._records.get(record.policy, ()), record)[-_NUM_KEPT:]

    def find(self, version: int, policy: str | None = None) -> "VersionRecord | None":
        """The record of a policy's version, the newest if it was published several times. None if it is not known."""
        records = self._records.get(policy, ())
        return next((record for record in reversed(records) if record.version == version), None)

    def forget(self, policy: str) -> None:
        """Drops the records of an adapter."""
        self._records.pop(policy, None)
