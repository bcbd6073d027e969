"""Which model of a run `ownloop chat`, `eval` and the others take."""

import asyncio
from pathlib import Path

from controller.commands.chat_and_eval import model_of
from controller.commands.command import OfCheckpoint
from controller.runs.folder import RunFolder
from tests.controller.commands.test_cli import add_checkpoint


def _model_of(run: Path, step: int | None = None) -> Path:
    options = OfCheckpoint(runs=run.parent, step=step)
    return Path(asyncio.run(model_of(options, str(run), run / "scratch", print)))


def _write_model(directory: Path) -> Path:
    """A directory that passes for a model's."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_run_continued_after_its_end_has_the_newest_model(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", {"num_steps": 1})
    folder.log_metrics({"step": 1.0})
    folder.mark_finished()
    folder.close()
    final = _write_model(folder.path / "model")
    assert _model_of(folder.path) == final
    add_checkpoint(folder.path)
    (checkpoint,) = (folder.path / "checkpoints").iterdir()
    exported = _write_model(folder.path / "exports" / checkpoint.name)
    assert _model_of(folder.path) == final
    RunFolder(folder.path, {"num_steps": 2}, resume=True).close()  # and stopped after that checkpoint
    assert _model_of(folder.path) == exported
