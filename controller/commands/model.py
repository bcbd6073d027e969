"""`ownloop model NAME`: prepares a model and prints its directory."""

import argparse
from collections.abc import Sequence

from controller.commands.command import Commands, refuse
from controller.commands.output import CapturedOutput


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("model", help="prepare a model and print its directory", allow_abbrev=False)
    parser.add_argument("model", metavar="NAME")
    parser.set_defaults(command=prepare_model)


def prepare_model(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the directory on standard output, and what is being done on standard error."""
    from controller.runs.models import resolve_model

    refuse(overrides)
    with CapturedOutput() as output:
        path = resolve_model(options.model, lambda text: print(text, file=output.errors))
        print(path, file=output.terminal)
    return 0
