"""`ownloop hosts kubernetes ROLE=PODS ... image=IMAGE`: the manifests of workers that stay from run to run, as YAML."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from controller.commands.command import Commands, refuse


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("hosts", help="print the Kubernetes manifests of workers", allow_abbrev=False)
    parser.add_argument("cluster", choices=["kubernetes"], help="what the manifests are for")
    parser.add_argument(
        "words",
        nargs="+",
        metavar="NAME=VALUE",
        help="roles and options, as after `--hosts kubernetes` of `ownloop run`",
    )
    parser.add_argument(
        "--certs", type=Path, default=Path("certs"), help="the folder of `ownloop certs`; new ones are made there"
    )
    parser.set_defaults(command=print_manifests)


def print_manifests(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints them, and what to do next. Returns the exit status."""
    refuse(overrides)
    from controller.hosts.certificates import CERTIFICATE, make_certificates
    from controller.hosts.host_groups import parse_hosts
    from controller.hosts.starting.kubernetes_hosts import KubernetesHosts, as_yaml, manifests

    hosts = parse_hosts([options.cluster, *options.words])
    assert isinstance(hosts, KubernetesHosts)
    names = [name for role in hosts.addresses.values() for name in role]
    if hosts.tls:
        make_certificates(options.certs, [name for name in names if not (options.certs / name / CERTIFICATE).exists()])
    print(as_yaml(manifests(hosts, {name: options.certs / name for name in names})), end="")
    scheme = "" if hosts.tls else "tcp://"
    roles = [
        f"{role}={','.join(f'{scheme}{name}:{hosts.port}' for name in names)}"
        for role, names in hosts.addresses.items()
    ]
    if hosts.tls:
        print("keep this to yourself: it holds the private keys of all pods", file=sys.stderr)
    print(f"then: ownloop run RECIPE --hosts {' '.join(roles)}", file=sys.stderr)
    return 0
