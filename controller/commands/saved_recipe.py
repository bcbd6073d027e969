"""`recipe.json` in a run's folder: the recipe's source and its options, from which the run can be resumed.

Resuming executes the source, so the folder of a run is a program: its owner alone can read or write the file.
"""

import shlex
from collections.abc import Sequence
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from controller.commands.recipes import recipe_files
from controller.runs.folder import CONFIG_FILE, FIRST_WEIGHTS, check_ended, complete_checkpoints, read_json, write_json
from controller.runs.metric_rows import SCHEMA_VERSION, check_schema
from rl.system.secret_fields import hidden_fields, hide_in_options

RECIPE_FILE = "recipe.json"
PARENT_FILE = "parent.json"
"""Which run and step a fork began at, and whether with the weights alone."""


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run given by path or by its name within `runs`. Raises ValueError if there is no such run."""
    paths = dict.fromkeys((Path(name), runs / name))
    for path in paths:
        if (path / CONFIG_FILE).is_file() and "model_type" not in read_json(path / CONFIG_FILE):
            return path
    raise ValueError(f"there is no run {name}: no {CONFIG_FILE} in {' or '.join(map(str, paths))}, or only a model's")


def run_of(name: str, runs: Path) -> Path | None:
    """The run of this path or name; None for a model, whose directory has a config.json but no logs."""
    paths = (path for path in (Path(name), runs / name) if (path / CONFIG_FILE).is_file())
    return next((path for path in paths if (path / "logs").is_dir()), None)


def save_recipe(
    folder: Path, file: Path, options: Sequence[str], recording: Path | None = None, **more: object
) -> None:
    """Saves the origin of a run's configuration: the recipe's source, its options, its recording, and more."""
    recipe = {
        "schema_version": SCHEMA_VERSION,
        "file": file.absolute(),
        "options": [options],
        "replay": recording,
        **more,
        "source": decode_source(file.read_bytes()),
    }
    write_json(folder / RECIPE_FILE, recipe, private=True)  # source and options may hold secrets


def add_options(folder: Path, options: Sequence[str]) -> None:
    """Appends the options that a run was resumed with to the saved ones."""
    if options:
        recipe = saved_recipe(folder)
        write_json(folder / RECIPE_FILE, {**recipe, "options": [*recipe["options"], options]}, private=True)


def saved_recipe(folder: Path) -> dict[str, Any]:
    """What `save_recipe` wrote. Raises ValueError for a folder without it or of another schema version."""
    file = folder / RECIPE_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {RECIPE_FILE}: it was not started by `ownloop run`; the script that started it "
            "continues it with RunFolder(path, config, resume=True)"
        )
    recipe = read_json(file)
    check_schema(recipe, folder)
    return recipe


def resume_hint(folder: Path) -> str:
    """One line for the user. `folder` is a run that `ownloop run` started."""
    if complete_checkpoints(folder / "checkpoints"):
        return f"to continue: {shlex.join(['ownloop', 'run', '--resume', str(folder)])}"
    return f"there is no checkpoint to continue from; to start again: {command_of(folder)}"


def check_has_checkpoint(folder: Path) -> None:
    """Raises ValueError for a run that is running, and for one without a complete checkpoint: how to start again."""
    check_ended(folder)
    if not complete_checkpoints(folder / "checkpoints"):
        raise ValueError(
            f"{folder} has no checkpoint to continue from; its content stays as it is. Start a new run: "
            f"{command_of(folder)}"
        )


def command_of(folder: Path) -> str:
    """The command that starts a run with the same recipe and options, in a folder of its own; secrets are hidden."""
    recipe = saved_recipe(folder)
    file = Path(recipe["file"])
    name = file.stem if recipe_files().get(file.stem) == file else str(file)
    hidden = hidden_fields(read_json(folder / CONFIG_FILE))
    options = [option for options in recipe["options"] for option in hide_in_options(options, hidden)]
    replay = ["--replay", str(recipe["replay"])] if recipe.get("replay") else []
    parent = read_json(folder / PARENT_FILE) if (folder / FIRST_WEIGHTS).is_dir() else {}
    if parent:
        fork = ["--fork", parent["run"], "--at", str(parent["step"]), "--restore", "weights"]
        return shlex.join(["ownloop", "run", *fork, *options])
    return shlex.join(["ownloop", "run", name, *replay, *options])
