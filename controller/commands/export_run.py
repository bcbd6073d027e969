"""`ownloop export RUN [--step N] [--to DIR]`: a checkpoint as a model directory, with its card.

`ownloop export tinker://RUN/weights/NAME` does so for one that a client of `ownloop serve` saved.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from controller.commands.command import Commands, add_run_options, refuse
from controller.commands.output import CapturedOutput
from rl.checks import how_to_install


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="a run's folder, its name within --runs, or a tinker:// path")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("gateway"),
        help="of a tinker:// path: the server's folder (default: gateway)",
    )
    parser.add_argument("--adapter", action="store_true", help="of a tinker:// path: only the adapter, for peft")
    parser.add_argument("--to", type=Path, metavar="DIR", help="a new folder (default: RUN/exports/step-N)")
    add_run_options(parser)
    parser.set_defaults(command=export)


def export(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the directory on standard output. `overrides` may change what a resumed run may change."""
    from controller.commands.brief_work import CommandEndedError, finish
    from controller.commands.model_card import add_model_card, name_of_data
    from controller.commands.resume import find_run, resumed_configuration
    from controller.runs.checkpoint_models import checkpoint_of, export_checkpoint

    if options.run.startswith("tinker://"):
        return _export_saved(options, overrides)
    if options.adapter:
        raise ValueError("--adapter is for tinker:// paths; a run's export has its adapter in adapter/")
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


def _export_saved(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """As `export`, for a checkpoint that a client saved."""
    if not all(importlib.util.find_spec(package) for package in ("tinker", "sqlalchemy")):
        raise ValueError(f"a tinker:// path needs packages that are not installed: {how_to_install('tinker')}")
    from controller.commands.brief_work import CommandEndedError, finish
    from controller.server.archive import export_saved, find_saved

    refuse(overrides)
    saved = find_saved(options.folder, options.run)
    directory = options.to or options.folder / "exports" / options.run.removeprefix("tinker://").replace(":", "-")
    with CapturedOutput() as output:
        logs = options.folder / "logs" / "export"
        logs.mkdir(parents=True, exist_ok=True)
        output.move_to(logs / "export.log")
        try:
            finish(export_saved(saved, directory, logs, adapter_only=options.adapter), output)
        except CommandEndedError as ended:
            return ended.status
        print(directory, file=output.terminal)
    return 0
