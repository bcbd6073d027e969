"""The commands of `ownloop`: `run RECIPE [--field value ...]`, `run --resume RUN`, and commands that inspect things.

Builds the parser, runs one command and turns mistakes into one line and an exit status. Each command has a file here.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from controller.commands import (
    certs,
    chat,
    check_engine,
    check_env,
    compare,
    doctor,
    eval_run,
    export_run,
    host_manifests,
    key,
    list_runs,
    model,
    parity,
    report_run,
    run,
    serve,
    show,
    sweep,
    worker,
)
from controller.commands import list as list_recipes
from controller.commands.command import USAGE
from controller.commands.recipes import HelpRequestedError
from rl.checks import see_working_directory


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see ownloop --help", file=sys.stderr)
        raise SystemExit(USAGE)


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command. Returns the exit status."""
    see_working_directory()  # a recipe's fields name environments, losses, rewards and tools
    try:
        resuming = any(word.partition("=")[0] in ("--resume", "--fork") for word in arguments)
        parser, commands = _parser(resuming=resuming)
        # Later, `--help` is the recipe's: `run RECIPE --help` lists its fields. `serve` has fields without a recipe.
        asks = len(arguments) > 1 and arguments[0] != "serve" and arguments[1] in ("-h", "--help")
        if asks and arguments[0] in commands:
            commands[arguments[0]].print_help()
            return 0
        options, overrides = parser.parse_known_args(arguments)
        _check_order(arguments, overrides)
        return options.command(options, overrides)
    except SystemExit as stop:  # argparse has printed the help or a mistake
        return int(stop.code or 0)
    except HelpRequestedError as help_text:
        print(help_text)
        return 0
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        if error.filename is None:  # not of a file or a folder that the caller named
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE


def _check_order(arguments: Sequence[str], overrides: Sequence[str]) -> None:
    """Raises ValueError if the parser has taken the value of an option that it does not know for an argument."""
    left = list(overrides)
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if not left or word != left[0]:
            continue
        del left[0]
        is_option = word.startswith("--") and "=" not in word
        if is_option and following and not following.startswith("--") and left[:1] != [following]:
            raise ValueError(f"{word} comes too early, or is not known: see ownloop {arguments[0]} --help")


def _parser(*, resuming: bool) -> tuple[_Parser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and its sub-parsers, one per command. Arguments that it does not know are left for the recipe."""
    parser = _Parser(prog="ownloop", description="RL post-training on hardware you own.", allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_parser(commands, resuming=resuming)
    for command in (
        sweep,
        list_recipes,
        show,
        list_runs,
        report_run,
        compare,
        eval_run,
        export_run,
        chat,
        parity,
        check_env,
        check_engine,
        model,
        serve,
        worker,
        doctor,
        host_manifests,
        key,
        certs,
    ):
        command.add_parser(commands)
    return parser, commands.choices
