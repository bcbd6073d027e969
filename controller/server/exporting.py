"""Checkpoints that clients saved, as model directories: `ownloop export tinker://RUN/weights/NAME`."""

from dataclasses import dataclass
from pathlib import Path

from controller.launching.launcher import Launcher
from controller.server.archive import Archive
from controller.server.database import DATABASE, Database
from rl.checks import check_empty_folder
from rl.hf_config import read_config
from rl.lora import LoRAConfig
from trainer.config import TrainerConfig


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
    database = Database(folder / DATABASE)
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
    own_dtype = str(config.get("dtype") or config.get("torch_dtype"))
    dtype = own_dtype if own_dtype in ("float32", "bfloat16") else "bfloat16"
    async with Launcher(log_dir) as launcher:
        trainer = await launcher.trainer(saved.model, TrainerConfig(compute_dtype=dtype, lora=saved.lora))
        await trainer.load_checkpoint(saved.checkpoint, weights_only=True)
        await (trainer.export_peft(directory) if adapter_only else trainer.export_hf(directory))
