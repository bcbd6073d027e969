"""Checkpoints by their `tinker://` paths: ordinary checkpoints of ours in the server's folder.

A path names a training run, a kind and a name. Names are checked, so that no path leaves the folder.
"""

import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tinker import types

from controller.server.database import CheckpointRow, Database, expiry, now

EXPORTED = "external_weights"
"""The middle part of the path of a checkpoint in the form of `peft` or `transformers`, which is there to download."""
KINDS: dict[str, types.CheckpointType] = {"weights": "training", "sampler_weights": "sampler", EXPORTED: "external"}
"""The middle part of a path, and the protocol's word for such a checkpoint."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN_ID = re.compile(r"[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPath:
    """The parts of `tinker://<run_id>/<kind>/<name>`."""

    run_id: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        """Raises ValueError unless the path is one of a checkpoint."""
        if not _RUN_ID.fullmatch(self.run_id) or self.kind not in KINDS:
            raise ValueError(
                f"path is {self}; it must be tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
            )
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name is {self.name!r}; it must start with a letter or a digit and have at most 128 letters, digits, "
                "dots, underscores and hyphens"
            )

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Raises ValueError unless the path is one of a checkpoint."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            raise ValueError(
                f"path is {path!r}; it must be tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
            )
        return cls(run_id=parts[0], kind=parts[1], name=parts[2])

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def folder(self) -> Path:
        """Where it lies in the server's folder."""
        return Path("checkpoints") / self.run_id.replace(":", "-") / self.kind / self.name


class Archive:
    """The checkpoints of all runs."""

    def __init__(self, folder: Path, database: Database) -> None:
        """`folder` is the server's."""
        self._folder = folder
        self._database = database

    async def save(
        self,
        path: CheckpointPath,
        write: Callable[[Path], Awaitable[None]],
        *,
        ttl_seconds: int | None,
        overwrite: bool,
        user_metadata: dict[str, str] | None,
    ) -> None:
        """Has `write` write a checkpoint into a folder that it is given.

        Raises ValueError if there is one of this name that must not be overwritten, and for a bad time to live.
        """
        expires_at = expiry(ttl_seconds)
        if not overwrite and self._database.checkpoint(str(path)) is not None:
            raise ValueError(f"{path} exists; choose another name, or save_state(..., overwrite=True)")
        folder = self._folder / path.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        await write(folder)
        self._note(path, expires_at, user_metadata)

    def _note(
        self, path: CheckpointPath, expires_at: datetime | None = None, user_metadata: dict[str, str] | None = None
    ) -> CheckpointRow:
        """Adds a checkpoint that is on disk to the database."""
        files = [file for file in (self._folder / path.folder).rglob("*") if file.is_file()]
        row = CheckpointRow(
            path=str(path),
            run_id=path.run_id,
            folder=str(path.folder),
            created_at=now(),
            expires_at=expires_at,
            size_bytes=sum(file.stat().st_size for file in files),
            user_metadata=user_metadata,
        )
        self._database.save(row)
        return row

    def find(self, path: str) -> tuple[CheckpointRow, Path]:
        """A checkpoint and where it lies. Raises ValueError if there is none.

        One that a script of yours has saved into the folder of a run counts as well.
        """
        parsed = CheckpointPath.parse(path)
        row = self._database.checkpoint(path)
        if row is None and self._database.run(parsed.run_id) is not None and (self._folder / parsed.folder).is_dir():
            row = self._note(parsed)
        if row is None:
            raise ValueError(f"there is no checkpoint {path}; `tinker checkpoint list` shows those that there are")
        return row, self._folder / row.folder

    def find_ours(self, path: str) -> tuple[CheckpointRow, Path]:
        """A checkpoint that a trainer can load. Raises ValueError if there is none, and for one that was exported."""
        if CheckpointPath.parse(path).kind == EXPORTED:
            raise ValueError(
                f"{path} was exported, to be downloaded; use a path of save_state or save_weights_for_sampler"
            )
        return self.find(path)

    def delete(self, path: str) -> None:
        """Deletes a checkpoint. Raises ValueError if there is none."""
        row, folder = self.find(path)
        self._database.delete(row.path)
        shutil.rmtree(folder, ignore_errors=True)

    def set_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Changes when a checkpoint expires. Raises ValueError if there is none, and for a bad time to live."""
        row, _ = self.find(path)
        row.expires_at = expiry(ttl_seconds)
        self._database.save(row)

    def delete_expired(self) -> None:
        """Deletes the checkpoints whose time has come."""
        for row in self._database.checkpoints():
            if row.expires_at is not None and row.expires_at <= now():
                self.delete(row.path)
