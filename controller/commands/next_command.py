"""How a user goes on with a run that has ended: the command that resumes it or, without a checkpoint, starts again."""

import shlex
from pathlib import Path

from controller.commands.recipes import recipe_files
from controller.commands.resume import saved_recipe
from controller.runs.folder import CONFIG_FILE, complete_checkpoints
from rl.secret_fields import hidden_fields, hide_in_options
from rl.system.disk import read_json


def how_to_go_on(folder: Path) -> str:
    """One line for the user. `folder` is a run that `ownloop run` started."""
    if complete_checkpoints(folder / "checkpoints"):
        return f"to go on: {shlex.join(['ownloop', 'run', '--resume', str(folder)])}"
    return f"there is no checkpoint to go on from; to start again: {command_of(folder)}"


def check_has_checkpoint(folder: Path) -> None:
    """Raises ValueError, naming the command to start again, for a run without a complete checkpoint."""
    if not complete_checkpoints(folder / "checkpoints"):
        raise ValueError(
            f"{folder} has no checkpoint to go on from; what it holds stays as it is. Start a new run: "
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
    return shlex.join(["ownloop", "run", name, *replay, *options])
