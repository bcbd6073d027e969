"""`ownloop export RUN [--step N] [--to DIR]`: a checkpoint as a model directory, with its card."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from controller.commands.command import Commands, add_run_options
from controller.commands.output import CapturedOutput


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name within --runs")
    parser.add_argument("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/exports/step-N)")
    add_run_options(parser)
    parser.set_defaults(command=export)


def export(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the directory on standard output. `overrides` may change what a resumed run may change."""
    from controller.commands.brief_work import CommandEndedError, finish
    from controller.commands.model_card import add_model_card, name_of_data
    from controller.commands.resume import find_run, resumed_configuration
    from controller.runs.checkpoint_models import checkpoint_of, export_checkpoint

    run = find_run(options.run, options.runs)
    checkpoint = checkpoint_of(run, options.step)
    directory = options.to or run / "exports" / checkpoint.name
    with CapturedOutput() as output:
        config = resumed_configuration(run, overrides, trust=options.trust)
        logs = run / "logs" / "export"
        logs.mkdir(parents=True, exist_ok=True)
        output.move_to(logs / "export.log")

        def tell(text: str) -> None:
            print(text, file=output.errors)

        try:
            finish(export_checkpoint(config, checkpoint, directory, logs, tell), output)
        except CommandEndedError as ended:
            return ended.status
        add_model_card(run, name_of_data(config), directory, int(checkpoint.name.rpartition("-")[2]))
        print(directory, file=output.terminal)
    return 0
