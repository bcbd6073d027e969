"""`ownloop eval RUN|MODEL RECIPE [--step N]`: the reward of a model on a recipe's held-out problems.

Starts the recipe's generator on the model, and no trainer unless a checkpoint has to be exported first.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.commands.command import Commands, add_run_options
from controller.commands.output import CapturedOutput
from controller.commands.recipes import check_hardware, configuration, find_recipe, has_gpu_elsewhere

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
    from controller.commands.brief_work import CommandEndedError, finish
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
    from controller.commands.run_models import model_of, run_of
    from controller.hosts.host_groups import kept_allocations
    from controller.launching.launcher import Launcher
    from controller.runs.rollout_source import RolloutSource
    from rl.runs.folder import began_at
    from rl.runs.timeline import show_progress_with

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
