"""What a controller knows of the versions its trainer published, which spares its generators a look into TorchStore."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads torch
    from rl.weights.manifest import VersionRecord

_REMEMBERED = 2  # as many as live


class VersionRecords:
    """The records of the newest versions, from the handle that pushed them to those that pull.

    TorchStore remains the directory: what is not found here is looked up there.
    """

    def __init__(self) -> None:
        """Nothing is published yet."""
        self._records: tuple[VersionRecord, ...] = ()

    def add(self, record: "VersionRecord") -> None:
        """Notes what was just published."""
        self._records = (*self._records, record)[-_REMEMBERED:]

    def find(self, version: int) -> "VersionRecord | None":
        """The record of a version, the newest if it was published twice; None for one that is not known here."""
        return next((record for record in reversed(self._records) if record.version == version), None)
