"""`ownloop runs`: a table of runs, newest first, with their states and last rewards."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import localtime, strftime

from controller.commands.command import Commands, add_runs_option, refuse

_HEAD = ("run", "state", "step", "in training", "held-out", "begun")
_TRAINING = ("reward_mean", "loss")
_HELD_OUT = ("eval_reward", "eval_kl_to_teacher", "eval_loss")


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("runs", help="list the runs, with their states and last rewards", allow_abbrev=False)
    add_runs_option(parser)
    parser.set_defaults(command=list_runs)


def list_runs(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints a line per run."""
    from controller.runs.folder import CONFIG_FILE

    refuse(overrides)
    configs = sorted(options.runs.glob(f"*/{CONFIG_FILE}"), key=lambda file: file.stat().st_ctime, reverse=True)
    runs = [config.parent for config in configs if (config.parent / "logs").is_dir()]
    if not runs:
        print(f"there are no runs in {options.runs}; --runs names another folder")
        return 0
    print_runs(runs)
    return 0


def print_runs(runs: Sequence[Path]) -> None:
    """Prints a line per run, below a heading."""
    table = [_HEAD, *map(_row, runs)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(run: Path) -> tuple[str, ...]:
    from controller.runs.folder import CONFIG_FILE, METRICS, read_metrics, state_of
    from rl.system.disk import read_json

    try:
        config, rows, state = read_json(run / CONFIG_FILE), read_metrics(run / METRICS), state_of(run)
    except ValueError as error:
        return (run.name, str(error), "-", "-", "-", "-")
    done, total = int(max((row["step"] for row in rows), default=0)), config.get("num_steps", "?")
    begun = rows[0].get("time") if rows else None
    when = strftime("%Y-%m-%d %H:%M", localtime(begun or (run / CONFIG_FILE).stat().st_mtime))
    return (run.name, state, f"{done}/{total}", _last(rows, _TRAINING), _last(rows, _HELD_OUT), when)


def _last(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> str:
    """The last value of the first of these metrics that the run has, with its name."""
    for name in names:
        values = [row[name] for row in rows if name in row]
        if values:
            return f"{name.removeprefix('eval_').removesuffix('_mean').replace('_', ' ')} {values[-1]:.3f}"
    return "-"
