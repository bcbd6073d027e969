"""`ownloop list`: the recipes, and the hardware that each is for."""

import argparse
from collections.abc import Sequence

from controller.commands.command import Commands, refuse
from controller.commands.recipes import describe, recipe_files


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("list", help="list the recipes and the hardware that each is for", allow_abbrev=False)
    parser.set_defaults(command=list_recipes)


def list_recipes(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints a line per recipe, without importing any of them."""
    del options
    refuse(overrides)
    files = recipe_files()
    width = max(map(len, files), default=0)
    for name, file in files.items():
        print(f"{name:<{width}}  {describe(file)}")
    return 0
