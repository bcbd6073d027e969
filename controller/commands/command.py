"""What the commands share: how a command joins the parser of `ownloop`, and the exit statuses.

The file of a command defines `add_parser`, which adds its arguments, and a function `(options, overrides) -> status`
that the parser names as `command`. `overrides` are the arguments that the parser does not know. Heavy packages are
imported inside these functions, so that `--help` and mistakes are quick.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

FAILED = 1
"""The command ran and failed."""
USAGE = 2
"""The caller made a mistake."""


class Commands(Protocol):
    """The object to which commands add their parsers: what `ArgumentParser.add_subparsers` returns."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002, argparse's own name
        allow_abbrev: bool,
        add_help: bool = True,
    ) -> argparse.ArgumentParser:
        """The parser of a new command."""
        ...


def add_runs_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--runs`."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept (default: runs)")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--runs`, `--step` and `--trust`, for commands that load a checkpoint of a run."""
    parser.add_argument("--step", type=int, help="the checkpoint's step (default: the newest)")
    parser.add_argument(
        "--trust", action="store_true", help="execute the run's recipe even if no run of yours wrote it"
    )
    add_runs_option(parser)


def refuse(overrides: Sequence[str]) -> None:
    """Raises ValueError for the first override. For commands that take none."""
    if overrides:
        raise ValueError(f"unexpected argument {overrides[0]}")


def folder_named(runs: Path, name: str) -> Path:
    """The folder of a new run within `runs`. Raises ValueError for a name that is not the name of a folder in it."""
    if name in ("", ".", "..") or name != Path(name).name or name.startswith("-") or not name.isprintable():
        raise ValueError(f"--name is {name!r}; it must be the name of a folder, without '/'; --runs says where it goes")
    return runs / name
