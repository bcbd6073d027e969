"""`ownloop runs` and `show`: what runs have recorded, and what a recipe would do."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns, TakesFields
from controller.commands.output import CapturedOutput
from controller.commands.recipes import configuration, recipe_files
from controller.commands.saved_recipe import find_run
from controller.runs.folder import CONFIG_FILE, METRICS, ROLLOUTS, check_run_schema, read_json, to_json
from controller.runs.metric_rows import last_row_with, metric_rows

if TYPE_CHECKING:
    from rl.types import Group

_NUM_SHOWN = 3
_HEAD = ("run", "state", "step", "in training", "held-out", "begun")
_TRAINING = ("reward_mean", "loss")
_HELD_OUT = ("eval_reward", "eval_kl_to_teacher", "eval_loss")


@dataclass(frozen=True, kw_only=True)
class Runs(OfRuns):
    """Lists the runs, with their states and last rewards."""

    def run(self) -> int:
        """Prints a line per run."""
        configs = sorted(self.runs.glob(f"*/{CONFIG_FILE}"), key=lambda file: file.stat().st_ctime, reverse=True)
        runs = [config.parent for config in configs if (config.parent / "logs").is_dir()]
        if runs:
            print_runs(runs)
        else:
            print(f"there are no runs in {self.runs}; --runs names another folder")
        return 0


def print_runs(runs: Sequence[Path]) -> None:
    """Prints a line per run, below a heading."""
    table = [_HEAD, *map(_row, runs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(run: Path) -> tuple[str, ...]:
    from controller.runs.folder import state_of

    try:
        config, state, metrics = read_json(run / CONFIG_FILE), state_of(run), run / METRICS
        first, values = next(metric_rows(metrics), {}), [_last(metrics, names) for names in (_TRAINING, _HELD_OUT)]
        ends = [row["step"] for name in ("", "seconds_step") if (row := last_row_with(metrics, name))]
    except (OSError, ValueError) as error:
        return (run.name, str(error), "-", "-", "-", "-")
    done, total = int(max(ends, default=0)), config.get("num_steps", "?")
    when = strftime("%Y-%m-%d %H:%M", localtime(first.get("time") or (run / CONFIG_FILE).stat().st_mtime))
    return (run.name, state, f"{done}/{total}", *values, when)


def _last(metrics: Path, names: Sequence[str]) -> str:
    """The last value of the first of these metrics that the run has, with its name."""
    for name in names:
        if row := last_row_with(metrics, name):
            return f"{name.removeprefix('eval_').removesuffix('_mean').replace('_', ' ')} {row[name]:.3f}"
    return "-"


@dataclass(frozen=True, kw_only=True)
class Show(OfRuns, TakesFields):
    """Prints a recipe's configuration, or the last rollouts of a run.

    `ownloop show RECIPE [--field value ...]` prints what a run would record in config.json.
    """

    recipe: Annotated[str, Positional, arg(metavar="RECIPE|RUN")]
    """A recipe, or a run's folder or its name within --runs."""

    def run(self) -> int:
        """Prints the configuration without its secrets, as a run would record it; or the rollouts."""
        run = _run_folder(self.recipe, self.runs)
        with CapturedOutput() as output:
            if run is None:
                config = configuration(self.recipe, self.fields, "show")
                print(json.dumps(to_json(config), indent=2), file=output.terminal)
                return 0
            if self.fields:
                raise ValueError(f"{self.fields[0]} is given for {self.recipe}, a run, whose fields are set")
            from controller.runs.console import Console

            console = Console(output.terminal)
            for heading, groups in _last_rollouts(run):
                print(heading, file=output.terminal)
                console.samples(groups[:_NUM_SHOWN])
        return 0


def _run_folder(name: str, runs: Path) -> Path | None:
    """The run of this path or name, unless the name is a recipe's."""
    try:
        run = find_run(name, runs)
    except ValueError:
        if Path(name).is_dir() and name not in recipe_files():
            raise
        return None
    return None if run != Path(name) and name in recipe_files() else run


def _last_rollouts(run: Path) -> "Iterator[tuple[str, Sequence[Group]]]":
    """A heading and the groups of the last evaluation and of the last training step.

    Raises ValueError without any, and for a run of another schema.
    """
    from controller.runs.recording import recorded_files
    from rl.rollouts.columns import read_groups

    check_run_schema(run)
    last = {kind: (step, file) for kind, step, file in recorded_files(run / ROLLOUTS)}
    if not last:
        raise ValueError(f"{run} has recorded no rollouts")
    for kind, (step, file) in last.items():
        yield _heading(kind, step, groups := read_groups(file), file), groups


def _heading(kind: str, step: int, groups: "Sequence[Group]", file: Path) -> str:
    rewards = [rollout.reward for group in groups for rollout in group.rollouts]
    mean = sum(rewards) / len(rewards)
    return f"{kind} {step}: {len(rewards)} rollouts of {len(groups)} problems, mean reward {mean:.3f}, in {file}"
