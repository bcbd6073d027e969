"""`ownloop check-env ENV`: says what is wrong with an environment."""

import argparse
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from controller.commands.command import FAILED, Commands, refuse
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from rl.checks import errors_of_user_code, see_working_directory

if TYPE_CHECKING:
    from rl.protocols import Env


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("check-env", help="say what is wrong with an environment", allow_abbrev=False)
    parser.add_argument("env", metavar="ENV", help='a recipe, or "module:name" of an environment or its factory')
    parser.set_defaults(command=check)


def check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints one line per finding. Returns 1 if there are any."""
    from rl.envs.check import check_env

    refuse(overrides)
    with CapturedOutput() as output:
        findings = check_env(load_env(options.env))
        for finding in findings or ["nothing is wrong with it"]:
            print(finding, file=output.terminal)
    return FAILED if findings else 0


def load_env(name: str) -> "Env":
    """The environment of a recipe or at "module:name", which names an environment, or a class or function to make one.

    Raises ValueError if there is no such environment, or if it cannot be made.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        config = load_recipe(find_recipe(name))
        env: Any = getattr(config, "env", None)
        if env is None:
            raise ValueError(f"recipe {name} has no environment")
        return env
    see_working_directory()
    with errors_of_user_code(f"environment {name!r} cannot be made"):
        found: Any = getattr(importlib.import_module(module), attribute)
        made: Any = found() if callable(found) else found
    return made
