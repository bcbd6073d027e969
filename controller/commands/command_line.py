"""The table of `ownloop`'s commands, and how one of them is run: mistakes become one line and an exit status.

    ownloop NAME WORDS -> the class that COMMANDS or an entry point names -> `parse` (by tyro) -> its method `run`

A command is a dataclass: its fields are the arguments, its docstring is the help. This file imports no command, so that
`ownloop --help` is quick.
"""

import ast
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rl.checks import see_working_directory, told, unknown_name
from rl.system.hardware import describe_software
from rl.system.plugins import find, named_by

FAILED = 1
"""The command ran and failed."""
USAGE = 2
"""The caller made a mistake."""

COMMANDS: Mapping[str, str] = {
    "run": "controller.commands.run:Run",
    "list": "controller.commands.recipes:List",
    "show": "controller.commands.show:Show",
    "runs": "controller.commands.show:Runs",
    "eval": "controller.commands.chat_and_eval:Eval",
    "export": "controller.commands.export_run:Export",
    "chat": "controller.commands.chat_and_eval:Chat",
}
"""Name -> `module:class` of every command that is always there."""
HELP = frozenset(("-h", "--help"))


@runtime_checkable
class Command(Protocol):
    """A command of `ownloop`. An entry point of `ownloop.commands` has the command's name and names such a dataclass.

    Its fields are the arguments, as tyro reads them, and its docstring is the help.
    """

    def run(self) -> int:
        """Runs it and returns the exit status. A ValueError is the user's mistake, and is printed in one line."""
        ...


class CommandEndedError(Exception):
    """The command is over, before its end: `status` is the exit status, and the message is for standard output."""

    def __init__(self, status: int, text: str = "") -> None:
        """The exit status, and what is printed."""
        super().__init__(text)
        self.status = status


def run_command(arguments: Sequence[str]) -> int:
    """Runs one command. Returns the exit status."""
    see_working_directory()  # a recipe's fields name environments, losses, rewards and tools
    try:
        if not arguments:
            raise ValueError("COMMAND is missing; see ownloop --help")
        if arguments[0] in HELP:
            print(_help())
            return 0
        if arguments[0] == "--version":
            print(describe_software().replace(", ", "\n"))
            return 0
        return parse_command(arguments).run()
    except CommandEndedError as ended:
        if str(ended):
            print(ended)
        return ended.status
    except ValueError as error:
        print(f"error: {told(error)}", file=sys.stderr)
        return USAGE
    except RuntimeError as error:
        from rl.system.disk import RecordingError  # loads NumPy

        if isinstance(error, RecordingError):
            print(f"error: {error}", file=sys.stderr)
            return FAILED
        if "home directory" not in str(error):  # of Path.home
            raise
        print("error: this user has no home directory, for a cache; set HOME", file=sys.stderr)
        return USAGE
    except OSError as error:
        if error.filename is None:  # not of a file or a folder that the caller named
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE


def parse_command(arguments: Sequence[str]) -> Any:
    """The command with its arguments, ready to run. Raises ValueError for a mistake, and as `parse` does."""
    name, *words = arguments
    scheme = next((word.partition("://")[0] for word in words if "://" in word and not word.startswith("-")), "")
    if scheme and (owner := f"{name}-{scheme}") in named_by(
        "commands"
    ):  # `export tinker://...` is the command export-tinker
        name = owner
    kind = _load(name)
    from controller.commands.command import parse  # takes a while, since it imports tyro

    return parse(kind, words, f"ownloop {name}")


def _load(name: str) -> type[Command]:
    """The class of a command. Raises ValueError, naming those there are, if there is none."""
    if name in COMMANDS:
        module, _, attribute = COMMANDS[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    found = find("commands", name, type[Command])
    if found is None:
        raise unknown_name("command", name, [*COMMANDS, *named_by("commands")], "commands")
    return found


def _help() -> str:
    """What `ownloop --help` prints."""
    commands = {**named_by("commands"), **COMMANDS}
    names = [*COMMANDS, *sorted(commands.keys() - COMMANDS.keys())]
    width = max(map(len, names))
    return "\n".join(
        (
            "usage: ownloop COMMAND ...\n\nRL post-training on hardware you own.\n\ncommands:",
            *(f"  {name:<{width}}  {_summary(commands[name])}" for name in names),
            "\n`ownloop COMMAND --help` lists the arguments of a command, `ownloop --version` what is installed.",
        )
    )


def _summary(target: str) -> str:
    """The first line of a command's docstring, read without importing its module; empty if it is not found."""
    module, _, attribute = target.partition(":")
    with contextlib.suppress(ImportError, SyntaxError):  # a plug-in may be broken
        spec = importlib.util.find_spec(module)
        source = Path(spec.origin).read_bytes() if spec and spec.origin and spec.origin.endswith(".py") else b""
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == attribute:
                return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
