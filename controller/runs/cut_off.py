"""Moves aside what a run wrote after the checkpoint that it goes on from, so that no step is there twice.

Nothing is destroyed: lines and files go to a folder in `cut_off/`, under their own names.
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from controller.runs.recording import recorded_files
from rl.system.files import sync_directory


def free_folder(parent: Path) -> Path:
    """A folder in `parent` that does not exist yet, named after the time."""
    name, number = time.strftime("%Y%m%d-%H%M%S"), 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def cut_lines(file: Path, length: int, into: Path) -> None:
    """Moves everything behind the first `length` bytes to a file of the same name in the folder `into`.

    Raises ValueError if the file is shorter than that.
    """
    size = file.stat().st_size if file.exists() else 0
    if size < length:
        raise ValueError(f"{file} has {size} bytes; it had {length} when the last checkpoint was saved")
    if size == length:
        return
    into.mkdir(parents=True, exist_ok=True)
    with file.open("rb+") as lines, (into / file.name).open("ab") as moved:
        lines.seek(length)
        shutil.copyfileobj(lines, moved)
        moved.flush()
        os.fsync(moved.fileno())
        sync_directory(into)
        lines.truncate(length)  # only now: whenever this is interrupted, no line is lost


def cut_recordings(directory: Path, lengths: Mapping[str, int], into: Path) -> None:
    """Moves the rollouts of later steps than `lengths` names for their kind, `rollouts/step` for example.

    Reads no file. Deletes the remains of files that a killed process was writing.
    """
    for partial in directory.glob(".*.partial"):
        partial.unlink()
    for kind, step, file in recorded_files(directory):
        if step > lengths.get(f"{directory.name}/{kind}", -1):
            (into / directory.name).mkdir(parents=True, exist_ok=True)
            file.rename(into / directory.name / file.name)
