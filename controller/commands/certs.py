"""`ownloop certs HOST ... --to DIR`: certificates with which a few hosts trust each other and nobody else."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from controller.commands.command import Commands, refuse


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("certs", help="make TLS certificates for the hosts of a lab", allow_abbrev=False)
    parser.add_argument(
        "host",
        nargs="+",
        metavar="HOST",
        help="a host's name as the others know it, and its other names and addresses after commas: n1,10.0.0.1",
    )
    parser.add_argument("--to", type=Path, default=Path("certs"), help="where they go (default: certs)")
    parser.set_defaults(command=certs)


def certs(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Makes the certificates. Returns the exit status."""
    refuse(overrides)
    from controller.hosts.certificates import CA_KEY, make_certificates

    for folder in make_certificates(options.to, options.host):
        print(f"{folder}: copy this folder to {folder.name} as ~/.config/ownloop/certs")
    print(f"{options.to / CA_KEY} lets further hosts in; keep it to yourself. Whoever has a host's key.pem can run any")
    print("program on every host of this authority.")
    return 0
