"""The configuration of a run that goes on: its own recipe, as it was, with the options it was started with.

`recipe.json` in a run's folder holds the recipe's source and the options, so that a recipe that was edited since
changes nothing. What they make is compared with `config.json`; new options may only change what is still to come.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.commands.recipes import load_recipe, override
from controller.commands.replay import replayed
from rl.runs.comparison import ABSENT, differences
from rl.runs.folder import CONFIG_FILE, LOOP_FILE, complete_checkpoints, to_json, write_json

_RECIPE_FILE = "recipe.json"
CHANGEABLE = ("num_steps", "checkpoint_every", "keep_checkpoints")
"""Fields that a resumed run may be given anew."""


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run given by path or by its name within `runs`. Raises ValueError when there is none."""
    for path in (Path(name), runs / name):
        if (path / CONFIG_FILE).is_file():
            return path
    raise ValueError(f"there is no run {name}: neither {Path(name)} nor {runs / name} holds a {CONFIG_FILE}")


def save_recipe(folder: Path, file: Path, options: Sequence[str], recording: Path | None = None) -> None:
    """Keeps what made a run's configuration: the recipe's source, the options given with it and what it replays."""
    source = file.read_text(encoding="utf-8")
    recipe = {"file": file.absolute(), "options": [options], "replay": recording, "source": source}
    write_json(folder / _RECIPE_FILE, recipe)


def add_options(folder: Path, options: Sequence[str]) -> None:
    """Keeps the options that a run was resumed with, behind the earlier ones."""
    if options:
        recipe = _saved_recipe(folder)
        write_json(folder / _RECIPE_FILE, {**recipe, "options": [*recipe["options"], options]})


def resumed_configuration(folder: Path, options: Sequence[str]) -> Any:
    """The configuration of the run in `folder`, with further options.

    Raises ValueError for an option that would change what the run has done already, and for a configuration that the
    recipe no longer makes.
    """
    recipe, name = _saved_recipe(folder), f"ownloop run --resume {folder}"
    config = load_recipe(Path(recipe["file"]), recipe["source"])
    for earlier in recipe["options"]:
        config = override(config, earlier, name)
    resumed = override(config, options, name)
    if recipe.get("replay"):
        config, resumed = (replayed(made, Path(recipe["replay"])) for made in (config, resumed))
    recorded = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    changed = {
        field: (before, after)
        for field, (before, after) in differences(recorded, to_json(config)).items()
        if field not in CHANGEABLE and before is not ABSENT  # fields that are new since then have their defaults
    }
    if changed:
        raise ValueError(
            f"the recipe of {folder} now makes another configuration: {_words(changed)}; what it imports has changed "
            "since the run began"
        )
    changed = differences(to_json(config), to_json(resumed))
    refused = {field: values for field, values in changed.items() if field not in CHANGEABLE}
    if refused:
        raise ValueError(
            f"a resumed run keeps its configuration, but for {', '.join(CHANGEABLE)}: {_words(refused)}; start a new "
            "run for that"
        )
    _check_num_steps(folder, resumed)
    return resumed


def _saved_recipe(folder: Path) -> dict[str, Any]:
    file = folder / _RECIPE_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {_RECIPE_FILE}: it was not started by `ownloop run`; the script that started it goes "
            "on with RunFolder(path, config, resume=True)"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def _check_num_steps(folder: Path, config: Any) -> None:
    """Raises ValueError when the run has done more steps than it is now to have."""
    complete, num_steps = complete_checkpoints(folder / "checkpoints"), getattr(config, "num_steps", None)
    done = json.loads((complete[-1] / LOOP_FILE).read_text(encoding="utf-8"))["step"] if complete else 0
    if num_steps is not None and num_steps < done:
        raise ValueError(f"num_steps is {num_steps}; the run has a checkpoint of step {done} already")


def _words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{field} was {before!r} and is now {after!r}" for field, (before, after) in changed.items())
