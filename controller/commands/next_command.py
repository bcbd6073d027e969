"""How a user goes on with a run that has ended: the command that resumes it or, without a checkpoint, starts again."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from controller.commands.recipes import recipe_files
from controller.commands.resume import saved_recipe
from rl.runs.folder import complete_checkpoints
from rl.runs.secret_fields import HIDDEN, is_secret


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
    options = [option for options in recipe["options"] for option in _without_secrets(options)]
    replay = ["--replay", str(recipe["replay"])] if recipe.get("replay") else []
    return shlex.join(["ownloop", "run", name, *replay, *options])


def _without_secrets(options: Sequence[str]) -> list[str]:
    """The options with the values of secret fields hidden, as "--env.api-key=..." or in an argument of their own."""
    shown: list[str] = []
    for index, option in enumerate(options):
        name, equals, _ = option.partition("=")
        before = options[index - 1] if index else ""
        if option.startswith("--"):
            shown.append(f"{name}={HIDDEN}" if equals and is_secret(name) else option)
        else:
            shown.append(HIDDEN if before.startswith("--") and "=" not in before and is_secret(before) else option)
    return shown
