"""`ownloop show RECIPE [--field value ...]`: the configuration that a run would have, as JSON."""

import argparse
import json
from collections.abc import Sequence

from controller.commands.command import Commands
from controller.commands.output import CapturedOutput
from controller.commands.recipes import configuration


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("show", help="print a recipe's configuration", allow_abbrev=False, add_help=False)
    parser.add_argument("recipe", metavar="RECIPE")
    parser.set_defaults(command=show)


def show(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the configuration without its secrets, as a run would record it."""
    from rl.runs.folder import to_json
    from rl.runs.secret_fields import hide_secrets

    with CapturedOutput() as output:
        config = configuration(options.recipe, overrides, "show")
        print(json.dumps(hide_secrets(to_json(config)), indent=2), file=output.terminal)
    return 0
