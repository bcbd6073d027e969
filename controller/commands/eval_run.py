"""`ownloop eval RUN|MODEL RECIPE [--step N]`: the reward of a model on a recipe's held-out problems.

Starts the recipe's generator on the model, and no trainer unless a checkpoint has to be exported first.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.commands.command import Commands, add_run_options
from controller.commands.output import CapturedOutput
from controller.commands.recipes import check_hardware, configuration, find_recipe, has_gpu_elsewhere
from controller.commands.resume import resumed_configuration
from controller.runs.folder import CONFIG_FILE

if TYPE_CHECKING:
    from controller.runs.console import Console
    from rl.rollouts.evaluation import Evaluation

_NEEDED = ("env", "generator", "sampling", "num_eval")


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "eval", help="measure a run's model, or any model, on a recipe's held-out problems", allow_abbrev=False
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="a run, or whatever --model takes")
    parser.add_argument("recipe", metavar="RECIPE", help="says what is asked, and how; --field value as in `run`")
    add_run_options(parser)
    parser.set_defaults(command=evaluate)


def evaluate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints each held-out measure with its interval, and samples."""
    from controller.commands.processes import CommandEndedError, finish
    from controller.runs.console import Console

    with CapturedOutput() as output:
        config = configuration(options.recipe, overrides, "eval")
        check_hardware(find_recipe(options.recipe), has_gpu=has_gpu_elsewhere(config))
        if missing := [name for name in _NEEDED if not hasattr(config, name)]:
            raise ValueError(f"{options.recipe} has no {missing[0]}: its loop samples nothing to reward")
        console = Console(output.terminal)
        with tempfile.TemporaryDirectory(prefix="ownloop-eval-") as scratch:
            try:
                evaluation = finish(_evaluation(options, config, console, Path(scratch)), output)
            except CommandEndedError as ended:
                return ended.status
            finally:
                console.close()
        console.samples(evaluation.groups[:3])
        console.evaluation(f"of {options.model}", evaluation)
    return 0


async def _evaluation(options: argparse.Namespace, config: Any, console: "Console", scratch: Path) -> "Evaluation":
    from controller.hosts.host_groups import kept_allocations
    from controller.launching.launcher import Launcher
    from controller.runs.folder import began_at
    from controller.runs.rollout_source import RolloutSource
    from rl.system.timeline import show_progress_with

    show_progress_with(console.progress)
    hosts = getattr(config, "hosts", None)
    async with kept_allocations(console.phase):
        # Hosts keep the copy that they get of a model, so they find it in its place the next time.
        model = await model_of(options, scratch, console.phase, keep=hosts is not None)
        run = run_of(options.model, options.runs)
        source = RolloutSource(replace(config, model=model), console.phase, began_at(run) if run else None)
        console.phase("starting the generator")
        async with Launcher(scratch / "logs", hosts) as launcher:
            # A model on disk is whole: an adapter has been merged into it.
            generator = await launcher.generator(source.model, replace(config.generator, lora=None))
            return await source.evaluate(generator)


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
