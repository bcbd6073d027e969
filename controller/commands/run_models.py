"""The model that a command's argument RUN|MODEL means."""

import argparse
from collections.abc import Callable
from pathlib import Path

from controller.commands.resume import resumed_configuration
from controller.runs.folder import CONFIG_FILE


def run_of(name: str, runs: Path) -> Path | None:
    """The run of this path or name; None if there is none. A model's directory has a config.json but no logs."""
    for path in (Path(name), runs / name):
        if (path / CONFIG_FILE).is_file() and (path / "logs").is_dir():
            return path
    return None


async def model_of(
    options: argparse.Namespace, scratch: Path, tell: Callable[[str], None], *, keep: bool = False
) -> str:
    """What `resolve_model` takes for `options.model`: the model's own name or, of a run, a directory.

    That is the checkpoint of `options.step`, exported to `scratch` unless `ownloop export` has done it; without a step
    the run's trained model or, if it has none yet or went on after it, its newest checkpoint. With `keep` it is
    exported to where `ownloop export` would. Raises ValueError for a step of a model, and for a run without that
    checkpoint.
    """
    from controller.runs.checkpoints import checkpoint_of, export_checkpoint
    from controller.runs.folder import FINISHED, complete_checkpoints, state_of

    run = run_of(options.model, options.runs)
    if run is None:
        if options.step is not None:
            raise ValueError(f"--step is {options.step}, but {options.model} is no run; a model has no steps")
        return options.model
    # The model of a run that was resumed after its end, and stopped, is that of its first part.
    is_final = state_of(run) == FINISHED or not complete_checkpoints(run / "checkpoints")
    if options.step is None and is_final and (run / "model" / "config.json").is_file():
        return str(run / "model")
    checkpoint = checkpoint_of(run, options.step)
    exported = run / "exports" / checkpoint.name
    if not (exported / "config.json").is_file():
        exported = exported if keep else scratch / "model"
        config = resumed_configuration(run, [], trust=options.trust)
        tell(f"loading {checkpoint}")
        await export_checkpoint(config, checkpoint, exported, scratch / "logs", tell)
    return str(exported)
