"""The configuration of a resumed run: its own recipe, as it was, with the options that the run was started with.

`recipe.json` in a run's folder holds the recipe's source and the options, so later edits of the recipe change nothing.
The resulting configuration is compared with `config.json`. New options may only change the steps still to come.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.commands.pinning import with_recorded_models
from controller.commands.recipes import load_recipe, override
from controller.commands.replay import replayed
from controller.commands.trust import check_own, is_own, signed
from controller.runs.comparison import ABSENT, differences
from controller.runs.folder import CONFIG_FILE, LOOP_FILE, complete_checkpoints
from controller.runs.metric_rows import SCHEMA_VERSION, check_schema
from rl.secret_fields import hide_secrets
from rl.system.disk import read_json, to_json, write_json

RECIPE_FILE = "recipe.json"
CHANGEABLE = (
    "num_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "on_failure",
    "max_restarts",
    "restart_window_minutes",
    "log",
    "hosts",
)
"""Fields that may be changed when a run is resumed."""


def find_run(name: str, runs: Path) -> Path:
    """The folder of a run given by path or by its name within `runs`. Raises ValueError if there is no such run."""
    for path in (Path(name), runs / name):
        if (path / CONFIG_FILE).is_file():
            return path
    raise ValueError(f"there is no run {name}: neither {Path(name)} nor {runs / name} holds a {CONFIG_FILE}")


def save_recipe(folder: Path, file: Path, options: Sequence[str], recording: Path | None = None) -> None:
    """Saves the origin of a run's configuration: the recipe's source, its options and the recording it replays."""
    recipe = {
        "schema_version": SCHEMA_VERSION,
        "file": file.absolute(),
        "options": [options],
        "replay": recording,
        "source": file.read_text(encoding="utf-8"),
    }
    write_json(folder / RECIPE_FILE, signed(recipe), private=True)  # source and options may hold secrets


def add_options(folder: Path, options: Sequence[str], *, trust: bool = False) -> None:
    """Appends the options that a run was resumed with to the saved ones. `trust` makes the recipe this user's own."""
    recipe = saved_recipe(folder)
    if options or trust:
        added = {**recipe, "options": [*recipe["options"], *([options] if options else [])]}
        write_json(folder / RECIPE_FILE, signed(added) if trust or is_own(recipe) else added, private=True)


def resumed_configuration(folder: Path, options: Sequence[str], *, trust: bool = False) -> Any:
    """The configuration of the run in `folder`, with further options. Executes the saved recipe.

    Secrets come from the recipe and may be new ones.

    Raises ValueError for a recipe that no run of this user wrote, unless `trust` is set, for an option that would
    change steps already done, for a recipe that no longer returns the recorded configuration, and for a folder of
    another schema version.
    """
    recipe, name = saved_recipe(folder), f"ownloop run --resume {folder}"
    if not trust:
        check_own(recipe, folder / RECIPE_FILE)
    config = load_recipe(Path(recipe["file"]), recipe["source"])
    for earlier in recipe["options"]:
        config = override(config, earlier, name)
    config = with_recorded_models(config, folder)
    resumed = override(config, options, name)
    if recipe.get("replay"):
        config, resumed = (replayed(made, Path(recipe["replay"])) for made in (config, resumed))
    recorded = read_json(folder / CONFIG_FILE)
    as_begun, as_resumed = (hide_secrets(to_json(made)) for made in (config, resumed))
    changed = {
        field: (before, after)
        for field, (before, after) in differences(recorded, as_begun).items()
        if not _may_change(field) and before is not ABSENT  # newer fields have their defaults
    }
    if changed:
        raise ValueError(
            f"the recipe of {folder} now makes another configuration: {_words(changed)}; the code that it imports has "
            "changed since the run began"
        )
    changed = differences(as_begun, as_resumed)
    refused = {field: values for field, values in changed.items() if not _may_change(field)}
    if refused:
        raise ValueError(
            f"a resumed run keeps its configuration except for {', '.join(CHANGEABLE)} and gpus: {_words(refused)}; "
            "start a new run for that"
        )
    _check_num_steps(folder, resumed)
    return resumed


def saved_recipe(folder: Path) -> dict[str, Any]:
    """What `save_recipe` wrote. Raises ValueError for a folder without it or of another schema version."""
    file = folder / RECIPE_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no {RECIPE_FILE}: it was not started by `ownloop run`; the script that started it goes "
            "on with RunFolder(path, config, resume=True)"
        )
    recipe: dict[str, Any] = read_json(file)
    check_schema(recipe, folder)
    return recipe


def _may_change(field: str) -> bool:
    """Whether a resumed run may have another value: a host may have other GPUs, whichever mesh names them."""
    return field in CHANGEABLE or field.rpartition(".")[2] == "gpus"


def _check_num_steps(folder: Path, config: Any) -> None:
    """Raises ValueError if the run has already done more than `num_steps` steps."""
    complete, num_steps = complete_checkpoints(folder / "checkpoints"), getattr(config, "num_steps", None)
    done = read_json(complete[-1] / LOOP_FILE)["step"] if complete else 0
    if num_steps is not None and num_steps < done:
        raise ValueError(f"num_steps is {num_steps}; the run has a checkpoint of step {done} already")


def _words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{field} was {before!r} and is now {after!r}" for field, (before, after) in changed.items())
