"""`ownloop parity RECIPE`: the same tokens through a recipe's trainer and generator. Saves nothing."""

import argparse
from collections.abc import Sequence

from controller.commands.command import FAILED, Commands
from controller.commands.output import CapturedOutput
from controller.commands.processes import CommandEndedError, finish
from controller.commands.recipes import check_hardware, configuration, find_recipe, has_gpu_elsewhere


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "parity", help="compare a recipe's trainer and generator on the same tokens", allow_abbrev=False, add_help=False
    )
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--limit", type=float, default=0.05, help="largest mean |log-prob mismatch| that passes")
    parser.set_defaults(command=parity)


def parity(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the table. Returns 1 if the mismatch is above the limit, or if the processes failed."""
    with CapturedOutput() as output:
        config = configuration(options.recipe, overrides, "parity")
        check_hardware(find_recipe(options.recipe), has_gpu=has_gpu_elsewhere(config))
        from controller.runs.mismatch import recipe_parity

        try:
            report = finish(recipe_parity(config, lambda text: print(text, file=output.errors)), output)
        except CommandEndedError as ended:
            return ended.status
        print(report.table(), file=output.terminal)
        if report.worst > options.limit:
            print(f"error: the mismatch is {report.worst:.2e}, above --limit {options.limit:g}", file=output.errors)
            return FAILED
    return 0
