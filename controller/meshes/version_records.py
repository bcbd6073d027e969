"""The controller's own copy of version records, which saves its generators a lookup in TorchStore."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the import would load torch
    from rl.weights.manifest import VersionRecord

_NUM_KEPT = 2  # as many versions as the trainer keeps; older ones cannot be pulled


class VersionRecords:
    """Records of the newest versions. The trainer's handle adds them, and generators' handles look them up.

    TorchStore remains the directory: a version that is not found here is looked up there.
    """

    def __init__(self) -> None:
        """Starts without records."""
        self._records: tuple[VersionRecord, ...] = ()

    def add(self, record: "VersionRecord") -> None:
        """Adds the record of a version that was just published."""
        self._records = (*self._records, record)[-_NUM_KEPT:]

    def find(self, version: int) -> "VersionRecord | None":
        """The record of a version, the newest if it was published several times. None if it is not known here."""
        return next((record for record in reversed(self._records) if record.version == version), None)
