"""`ownloop report RUN`: the run as one HTML page."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from controller.commands.command import Commands, add_runs_option, refuse
from controller.commands.output import CapturedOutput

if TYPE_CHECKING:
    pass


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "report", help="write a run's curves, times, samples and warnings as one HTML page", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name within --runs; it may be going on")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where the page goes (default: RUN/report.html)")
    add_runs_option(parser)
    parser.set_defaults(command=report)


def report(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the path of the page."""
    from controller.commands.saved_recipe import RECIPE_FILE, command_of, find_run
    from controller.runs.report.page import write_report
    from controller.runs.report.samples import decoder_of
    from rl.system.disk import RecordingError

    refuse(overrides)
    if options.to is not None and options.to.is_dir():
        raise ValueError(f"--to is {options.to}, a folder; it must name a file")
    run = find_run(options.run, options.runs)
    with CapturedOutput() as output:
        command = command_of(run) if (run / RECIPE_FILE).is_file() else ""
        decode = decoder_of(run)
        if decode is None:
            print("the run's tokenizer is not here: answers are shown without their tokens", file=output.errors)
        try:
            print(write_report(run, decode, command, options.to), file=output.terminal)
        except RecordingError as error:
            raise ValueError(str(error)) from error
    return 0
