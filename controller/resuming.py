"""The configuration of a run that goes on: its own recipe, as it was, with the options it was started with.

`recipe.json` in a run's folder holds the recipe's source and the options, so that a recipe that was edited since
changes nothing. What they make is compared with `config.json`; new options may only change what is still to come.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from controller.recipes import load_recipe, override
from rl.recording import CONFIG_FILE, LOOP_FILE, complete_checkpoints, to_json, write_json

_RECIPE_FILE = "recipe.json"
CHANGEABLE = ("num_steps", "checkpoint_every", "keep_checkpoints")
"""Fields that a resumed run may be given anew."""
_ABSENT = "(absent)"


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run given by path or by its name within `runs`. Raises ValueError when there is none."""
    for path in (Path(name), runs / name):
        if (path / CONFIG_FILE).is_file():
            return path
    raise ValueError(f"there is no run {name}: neither {Path(name)} nor {runs / name} holds a {CONFIG_FILE}")


def save_recipe(folder: Path, file: Path, options: Sequence[str]) -> None:
    """Keeps what made a run's configuration: the recipe's source and the options given with it."""
    source = file.read_text(encoding="utf-8")
    write_json(folder / _RECIPE_FILE, {"file": file.absolute(), "options": [options], "source": source})


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
    recorded = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    changed = {
        field: (before, after)
        for field, (before, after) in _differences(recorded, to_json(config)).items()
        if field not in CHANGEABLE and before is not _ABSENT  # fields that are new since then have their defaults
    }
    if changed:
        raise ValueError(
            f"the recipe of {folder} now makes another configuration: {_words(changed)}; what it imports has changed "
            "since the run began"
        )
    resumed = override(config, options, name)
    changed = _differences(to_json(config), to_json(resumed))
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


def _differences(before: Any, after: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted field -> the two values, wherever they are not the same."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        old, new = cast("Mapping[str, Any]", before), cast("Mapping[str, Any]", after)
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(key for key in new if key not in old)]:
            found |= _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{prefix}.{key}" if prefix else key)
        return found
    return {} if before == after else {prefix: (before, after)}


def _words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{field} was {before!r} and is now {after!r}" for field, (before, after) in changed.items())
