"""Checkpoints by their `tinker://` paths: ordinary checkpoints of ours in the server's folder.

A path names a training run, a kind and a name. Names are checked, so that no path leaves the folder.
`ownloop export tinker://RUN/weights/NAME` writes one as a model directory.
"""

import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tinker import types

from controller.launching.launcher import Launcher
from ownloop_server.database import DATABASE, CheckpointRow, Database, expiry, now, texts
from rl.checks import check_empty_folder
from rl.lora import LoRAConfig
from rl.system.hf_config import read_config
from trainer.config import TrainerConfig

EXPORTED = "external_weights"
"""The middle part of the path of a checkpoint in the form of `peft` or `transformers`, which is there to download."""
KINDS: dict[str, types.CheckpointType] = {"weights": "training", "sampler_weights": "sampler", EXPORTED: "external"}
"""The middle part of a path, and the protocol's word for such a checkpoint."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # also safe as a file name
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
        # a colon in a folder's name confuses PATH-like lists and other systems
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
        expires_at, noted = expiry(ttl_seconds), texts("user_metadata", user_metadata)
        if not overwrite and self._database.checkpoint(str(path)) is not None:
            raise ValueError(f"{path} exists; choose another name, or save_state(..., overwrite=True)")
        folder = self._folder / path.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        await write(folder)  # the trainer's ranks write it, so the folder is on a file system that they share
        self._note(path, expires_at, noted)

    def _note(
        self, path: CheckpointPath, expires_at: datetime | None = None, user_metadata: dict[str, str] | None = None
    ) -> CheckpointRow:
        """Adds a checkpoint that is on disk to the database."""
        # measured on disk: only the ranks know what they wrote
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
        # written, but the server was killed before it noted it
        if row is None and self._database.run(parsed.run_id) is not None and (self._folder / parsed.folder).is_dir():
            row = self._note(parsed)
        if row is None:
            raise ValueError(f"there is no checkpoint {path}; `tinker checkpoint list` shows all of them")
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
        self._database.delete(row.path)  # the record first: a folder without a record is found again
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """What a checkpoint is of."""

    model: Path
    """The directory of the base model."""
    lora: LoRAConfig | None
    """The adapter; None if all weights were trained."""
    checkpoint: Path


def find_saved(folder: Path, path: str) -> SavedPolicy:
    """Looks a `tinker://` path up in a server's folder. The server may be running.

    Raises ValueError if there is no such checkpoint.
    """
    if not (folder / DATABASE).is_file():
        raise ValueError(f"{folder} is not the folder of a server; --folder names it")
    database = Database(folder / DATABASE)  # of its own: the server's connection belongs to another process
    try:
        row, checkpoint = Archive(folder, database).find(path)
        run = database.run(row.run_id)
        assert run is not None, "a checkpoint's run is in the database before the checkpoint"
    finally:
        database.close()
    if not Path(run.directory).is_dir():
        raise ValueError(f"the base model of {path} was at {run.directory!r}, which is no directory any more")
    return SavedPolicy(model=Path(run.directory), lora=run.lora if run.rank else None, checkpoint=checkpoint)


async def export_saved(saved: SavedPolicy, directory: Path, log_dir: Path, *, adapter_only: bool) -> None:
    """Writes the merged model to `directory`, or only the adapter in PEFT's form.

    Raises ValueError if `directory` holds something, and for the adapter of a policy that has none.
    """
    check_empty_folder(directory)
    if adapter_only and saved.lora is None:
        raise ValueError("--adapter: all weights of this policy were trained; leave --adapter out")
    config = read_config(saved.model)
    own_dtype = str(config.get("dtype") or config.get("torch_dtype"))  # transformers has renamed the key
    dtype = own_dtype if own_dtype in ("float32", "bfloat16") else "bfloat16"
    async with Launcher(log_dir) as launcher:
        trainer = await launcher.trainer(saved.model, TrainerConfig(compute_dtype=dtype, lora=saved.lora))
        await trainer.load_checkpoint(saved.checkpoint, weights_only=True)
        await (trainer.export_peft(directory) if adapter_only else trainer.export_hf(directory))
