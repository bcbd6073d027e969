"""`ownloop run --fork RUN --at STEP [--field value ...]`: a new run that goes on from a checkpoint of another.

The new run's folder begins with what its parent had recorded up to that step, so its curves are whole, and with the
checkpoint itself: the trainers' parameters, optimizer state and random state, and the position in the data. From there
it is resumed as any run is. Every field may be changed for the steps to come; without a change they are its parent's.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from controller.commands.pinning import with_pinned_models, with_recorded_models
from controller.commands.recipes import load_recipe, override
from controller.commands.replay import replayed
from controller.commands.resume import RECIPE_FILE, saved_recipe
from controller.commands.trust import check_own, signed
from controller.runs.folder import LOOP_FILE, METRICS, ROLLOUTS, RunFolder, began_at
from controller.runs.models import Tell
from controller.runs.recording import recorded_files
from rl.system.disk import read_json, write_json

PARENT_FILE = "parent.json"


def forked_configuration(parent: Path, options: Sequence[str], tell: Tell, *, trust: bool = False) -> Any:
    """The configuration of the run in `parent`, with these options. Executes its saved recipe.

    Raises ValueError for a recipe that no run of this user wrote, unless `trust` is set, and as `override` does.
    """
    recipe, name = saved_recipe(parent), f"ownloop run --fork {parent}"
    if not trust:
        check_own(recipe, parent / RECIPE_FILE)
    config = load_recipe(Path(recipe["file"]), recipe["source"])
    for earlier in recipe["options"]:
        config = override(config, earlier, name)
    config = with_pinned_models(override(with_recorded_models(config, parent), options, name), tell)
    return replayed(config, Path(recipe["replay"])) if recipe.get("replay") else config


def forked_folder(path: Path, config: Any, parent: Path, checkpoint: Path, options: Sequence[str]) -> RunFolder:
    """A new run's folder at `path` that holds `checkpoint` of the run in `parent`, and what was recorded until then.

    Files that never change are linked where the disk allows it. Raises ValueError if `path` cannot be used, and for a
    `num_steps` that the checkpoint has reached.
    """
    loop: dict[str, Any] = read_json(checkpoint / LOOP_FILE)
    num_steps = getattr(config, "num_steps", None)
    if num_steps is not None and num_steps <= loop["step"]:
        raise ValueError(
            f"num_steps is {num_steps}, and the checkpoint is of step {loop['step']}; --num-steps must be more"
        )
    folder = RunFolder(path, config, began=began_at(parent))
    lengths: dict[str, int] = loop["lengths"]
    with (parent / METRICS).open("rb") as metrics:
        folder.metrics_file.write_bytes(metrics.read(lengths.get(METRICS, 0)))
    for kind, step, file in recorded_files(parent / ROLLOUTS):
        if step <= lengths.get(f"{ROLLOUTS}/{kind}", -1):
            folder.rollouts.mkdir(exist_ok=True)
            _link(str(file), str(folder.rollouts / file.name))
    recipe = saved_recipe(parent)
    added = {**recipe, "options": [*recipe["options"], *([options] if options else [])]}
    write_json(folder.path / RECIPE_FILE, signed(added), private=True)
    write_json(folder.path / PARENT_FILE, {"run": parent.absolute(), "step": loop["step"]})
    # The checkpoint comes last, and under its name only once it is whole.
    folder.checkpoints.mkdir()
    partial = folder.checkpoints / f".{checkpoint.name}"
    shutil.copytree(checkpoint, partial, copy_function=_link)
    partial.rename(folder.checkpoints / checkpoint.name)
    folder.begin_again()
    return folder


def _link(source: str, target: str) -> None:
    """A second name for a file, or a copy of it on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
