"""`ownloop check-engine ENGINE`: runs the contract of training engines on one, and prints a table."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from controller.commands.command import FAILED, Commands, refuse
from controller.commands.output import CapturedOutput
from trainer.config import parse_layout
from trainer.engine_table import find_engine

if TYPE_CHECKING:
    from trainer.engines.contract.kit import Finding

_LAYOUTS = ("data_parallel_shard=2", "data_parallel_replicate=2")


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "check-engine", help="check that a training engine keeps its contract", allow_abbrev=False
    )
    parser.add_argument("engine", metavar="ENGINE", help='an engine\'s name, or "module:class"')
    parser.add_argument(
        "--layout",
        action="append",
        metavar="FIELD=N[,FIELD=N]",
        help=f"a layout of several ranks, such as tensor_parallel=2; may be repeated (default: {', '.join(_LAYOUTS)})",
    )
    parser.add_argument("--one-rank", action="store_true", help="check no layout of several ranks")
    parser.set_defaults(command=check)


def check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints one line per check. Returns 1 if one failed; a layout that the engine refuses is none."""
    refuse(overrides)
    if ":" not in options.engine:
        find_engine(options.engine)
    layouts = () if options.one_rank else tuple(options.layout or _LAYOUTS)
    for layout in layouts:
        parse_layout(layout)
    with CapturedOutput() as output, tempfile.TemporaryDirectory() as scratch:
        from trainer.engines.contract.kit import check_engine  # takes seconds

        passed = check_engine(options.engine, layouts, Path(scratch), lambda finding: _print(finding, output.terminal))
        print(f"{options.engine} {'keeps' if passed else 'breaks'} the contract of engines", file=output.terminal)
    return 0 if passed else FAILED


def _print(finding: "Finding", terminal: TextIO) -> None:
    print(f"{finding.subject:<25} {finding.check:<26} {finding.outcome:<8} {finding.detail}", file=terminal)
