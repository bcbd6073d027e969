"""`ownloop show RECIPE [--field value ...]`: the configuration that a run would have, as JSON.

`ownloop show RUN`: the last rollouts that a run recorded, as text.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from controller.commands.command import Commands, add_runs_option, refuse
from controller.commands.output import CapturedOutput
from controller.commands.recipes import configuration, find_recipe

if TYPE_CHECKING:
    from rl.types import Group

_NUM_SHOWN = 3


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "show",
        help="print a recipe's configuration, or the last rollouts of a run",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("recipe", metavar="RECIPE_OR_RUN")
    add_runs_option(parser)
    parser.set_defaults(command=show)


def show(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints the configuration without its secrets, as a run would record it; or the rollouts."""
    from rl.secret_fields import hide_secrets
    from rl.system.disk import to_json

    run = _run_folder(options.recipe, options.runs)
    with CapturedOutput() as output:
        if run is None:
            config = configuration(options.recipe, overrides, "show")
            print(json.dumps(hide_secrets(to_json(config)), indent=2), file=output.terminal)
            return 0
        refuse(overrides)
        from controller.runs.console import Console

        console = Console(output.terminal)
        for heading, groups in _last_rollouts(run):
            print(heading, file=output.terminal)
            console.samples(groups[:_NUM_SHOWN])
    return 0


def _run_folder(name: str, runs: Path) -> Path | None:
    """The run of this path or name, unless the name is a recipe's."""
    from controller.runs.folder import CONFIG_FILE

    if (Path(name) / CONFIG_FILE).is_file():
        return Path(name)
    if not (runs / name / CONFIG_FILE).is_file():
        return None
    try:
        find_recipe(name)
    except ValueError:
        return runs / name
    return None


def _last_rollouts(run: Path) -> "Iterator[tuple[str, Sequence[Group]]]":
    """A heading and the groups of the last evaluation and of the last training step.

    Raises ValueError without any, and for a run of another schema.
    """
    from controller.runs.folder import ROLLOUTS, check_run_schema
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
