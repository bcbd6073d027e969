"""`ownloop check-env`, `check-engine` and `parity`: whether a part of a run keeps its contract."""

import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from tyro.conf import Positional, UseAppendAction, arg

from controller.commands.command import TakesFields
from controller.commands.command_line import FAILED
from controller.commands.output import CapturedOutput
from controller.commands.processes import finish
from controller.commands.recipes import find_recipe, load_recipe, runnable_configuration
from controller.runs.loop_config import options_of
from rl.checks import errors_of_user_code, see_working_directory
from trainer.config import parse_layout
from trainer.engine_table import find_engine

if TYPE_CHECKING:
    from ownloop_doctors.kit import Finding
    from rl.protocols import Env

_LAYOUTS = ("data_parallel_shard=2", "data_parallel_replicate=2")


@dataclass(frozen=True, kw_only=True)
class CheckEnv:
    """Says what is wrong with an environment."""

    env: Annotated[str, Positional, arg(metavar="ENV")]
    """A recipe, or "module:name" of an environment or its factory."""

    def run(self) -> int:
        """Prints one line per finding. Returns 1 if there are any."""
        from ownloop_doctors.check_env import check_env

        with CapturedOutput() as output:
            findings = check_env(load_env(self.env))
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
        env: Any = options_of(config).env
        if env is None:
            raise ValueError(f"recipe {name} has no environment")
        return env
    see_working_directory()
    with errors_of_user_code(f"environment {name!r} cannot be made"):
        found: Any = getattr(importlib.import_module(module), attribute)
        made: Any = found() if callable(found) else found
    return made


@dataclass(frozen=True, kw_only=True)
class CheckEngine:
    """Checks that a training engine keeps its contract."""

    engine: Annotated[str, Positional, arg(metavar="ENGINE")]
    """An engine's name, or "module:class"."""
    layout: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FIELD=N[,FIELD=N]")] = ()
    """A layout of several ranks, by default data_parallel_shard=2 and data_parallel_replicate=2."""
    one_rank: bool = False
    """Check no layout of several ranks."""

    def run(self) -> int:
        """Prints one line per check. Returns 1 if one failed; a layout that the engine refuses is none."""
        if ":" not in self.engine:
            find_engine(self.engine)
        layouts = () if self.one_rank else self.layout or _LAYOUTS
        for layout in layouts:
            parse_layout(layout)
        with CapturedOutput() as output, tempfile.TemporaryDirectory() as scratch:
            from ownloop_doctors.kit import check_engine  # takes seconds

            passed = check_engine(self.engine, layouts, Path(scratch), lambda finding: _print(finding, output.terminal))
            print(f"{self.engine} {'keeps' if passed else 'breaks'} the contract of engines", file=output.terminal)
        return 0 if passed else FAILED


def _print(finding: "Finding", terminal: TextIO) -> None:
    print(f"{finding.subject:<25} {finding.check:<26} {finding.outcome:<8} {finding.detail}", file=terminal)


@dataclass(frozen=True, kw_only=True)
class Parity(TakesFields):
    """Compares a recipe's trainer and generator on the same tokens.

    `ownloop parity RECIPE --help` lists the recipe's fields. Nothing is saved.
    """

    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """A name that `ownloop list` shows, or a Python file's path."""
    limit: float = 0.05
    """The largest mean |log-prob mismatch| that passes."""

    def run(self) -> int:
        """Prints the table. Returns 1 if the mismatch is above the limit, or if the processes failed."""
        with CapturedOutput() as output:
            config = runnable_configuration(self.recipe, self.fields, "parity")
            from ownloop_doctors.mismatch import recipe_parity

            report = finish(recipe_parity(config, output.say), output)
            print(report.table(), file=output.terminal)
            if report.worst > self.limit:
                output.say(f"error: the mismatch is {report.worst:.2e}, above --limit {self.limit:g}")
                return FAILED
        return 0
