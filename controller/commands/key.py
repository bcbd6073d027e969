"""`ownloop key add|list|revoke`: the keys of a server's users."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from controller.commands.command import Commands, refuse


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("key", help="make and revoke the keys of ownloop serve", allow_abbrev=False)
    parser.add_argument("action", choices=("add", "list", "revoke"), help="what to do")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the user")
    parser.add_argument(
        "--folder", type=Path, default=Path("gateway"), help="--folder of the server (default: gateway)"
    )
    parser.add_argument("--operator", action="store_true", help="add: a user who sees and manages everyone's runs")
    parser.set_defaults(command=key)


def key(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints a new key, or who has one. A running server notices at once."""
    from controller.server.keys import Keys

    refuse(overrides)
    keys = Keys(options.folder)
    if options.action == "list":
        for name, about in keys.list().items():
            print(f"{name}  {about}")
        return 0
    if options.name is None:
        raise ValueError(f"ownloop key {options.action} needs the user's NAME")
    if options.action == "add":
        print(keys.add(options.name, operator=options.operator))
    else:
        keys.revoke(options.name)
    return 0
