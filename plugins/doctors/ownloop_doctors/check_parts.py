"""`ownloop check-env`, `check-engine` and `parity`: whether a part of a run keeps its contract."""

import importlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
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
from rl.system.plugins import how_to_install, is_installed
from trainer.config import LayoutConfig
from trainer.engine_table import find_engine

if TYPE_CHECKING:
    from ownloop_doctors.kit import Finding
    from ownloop_doctors.reward_attacks import AttackReport
    from rl.protocols import Env

_LAYOUTS = ("data_parallel_shard=2", "data_parallel_replicate=2")


@dataclass(frozen=True, kw_only=True)
class CheckEnv:
    """Says what is wrong with an environment, and attacks its reward."""

    env: Annotated[str, Positional, arg(metavar="ENV")]
    """A recipe, or "module:name" of an environment or its factory; with --rows, "module:name" of a reward function."""
    contract_only: bool = False
    """Check the contract of environments, and leave the reward in peace."""
    rows: Annotated[Path | None, arg(metavar="FILE.jsonl")] = None
    """Problems for a reward function: rows with prompt and, where known, answer."""
    columns: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME=COLUMN")] = ()
    """With --rows: the column that a parameter gets, such as ground_truth=answer, or solution_str=completion for the
    answer; may be given several times."""
    group_size: int = 8
    """Rollouts of a group, for the share of groups with a signal."""

    def __post_init__(self) -> None:
        """Raises ValueError for options that exclude each other."""
        if self.rows is not None and self.contract_only:
            raise ValueError("--contract-only is for environments, and --rows for a function, which has no contract")
        if self.columns and self.rows is None:
            raise ValueError(f"--columns is {self.columns[0]}; it says what the columns of --rows are")
        if self.group_size < 2:
            raise ValueError(f"--group-size is {self.group_size}; it must be at least 2")

    def run(self) -> int:
        """Prints one line per finding, and the table of attacks. Returns 1 if there are findings."""
        from ownloop_doctors.check_env import check_env

        with CapturedOutput() as output:
            env = None if self.rows is not None else load_env(self.env)
            findings = [] if env is None else check_env(env)
            lines = [] if self.rows is not None else findings or ["nothing is wrong with it"]
            if not findings and not self.contract_only:
                report = self._attacked(env)
                lines += ["", *report.lines()]
                findings = [*report.findings]
            print("\n".join(lines), file=output.terminal)
        return FAILED if findings else 0

    def _attacked(self, env: "Env | None") -> "AttackReport":
        from ownloop_doctors.reward_attacks import NUM_PROBLEMS, attacked
        from ownloop_doctors.rows import parse_columns, problems_of_rows, read_columns
        from rl.checks import named_function
        from rl.protocols import best_reward_of
        from rl.rollouts.guard import DEFAULT_TIME_LIMIT_S, time_limit_of

        if env is not None:
            problems = env.train_problems(0, 0, NUM_PROBLEMS)
            return attacked(problems, time_limit_of(env), best_reward_of(env), self.group_size)
        assert self.rows is not None
        columns, said = parse_columns(self.columns)
        rows = read_columns(self.rows, columns, ("prompt",))
        problems = problems_of_rows(rows[:: max(len(rows) // NUM_PROBLEMS, 1)], named_function("ENV", self.env), said)
        return attacked(problems[:NUM_PROBLEMS], DEFAULT_TIME_LIMIT_S, 1.0, self.group_size)


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


def parse_layout(text: str) -> dict[str, Any]:
    """`tensor_parallel=2,sequence_parallel=False` as fields. Raises ValueError, naming those there are."""
    values: dict[str, Any] = {}
    types = {field.name: type(field.default) for field in fields(LayoutConfig)}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in types:
            raise ValueError(f"layout is {text!r}; it must be like tensor_parallel=2, with fields {', '.join(types)}")
        try:
            values[name] = {"True": True, "False": False}[value] if types[name] is bool else types[name](value)
        except (ValueError, KeyError):
            needed = "True or False" if types[name] is bool else "a whole number"
            raise ValueError(f"layout {name} is {value!r}; it must be {needed}") from None
    return values


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
    bitwise: bool = False
    """With `--numerics bitwise`: name the first operation, with its layer, whose output differs by a bit."""

    def run(self) -> int:
        """Prints the table. Returns 1 if the mismatch is above the limit, or if the processes failed."""
        if self.bitwise:
            if not is_installed("ownloop-bitwise"):
                raise ValueError(f"--bitwise needs ownloop-bitwise: {how_to_install('ownloop-bitwise')}")
            if (numerics := runnable_configuration(self.recipe, self.fields, "parity").numerics) != "bitwise":
                raise ValueError(f"numerics is {numerics!r}, and --bitwise is for 'bitwise'; add --numerics bitwise")
            command = [sys.executable, "-m", "ownloop_bitwise.trace", self.recipe, *self.fields]
            return subprocess.run(command, check=False).returncode
        with CapturedOutput() as output:
            config = runnable_configuration(self.recipe, self.fields, "parity")
            from ownloop_doctors.mismatch import recipe_parity

            report = finish(recipe_parity(config, output.say), output)
            print(report.table(), file=output.terminal)
            if report.worst > self.limit:
                output.say(f"error: the mismatch is {report.worst:.2e}, above --limit {self.limit:g}")
                return FAILED
        return 0
