"""`ownloop hosts kubernetes ROLE=PODS ... image=IMAGE`: the manifests of workers that stay from run to run, as YAML.

The command is an entry point of the group `ownloop.commands` in pyproject.toml.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class HostManifests:
    """Prints the Kubernetes manifests of workers."""

    cluster: Annotated[Literal["kubernetes"], Positional]
    """What the manifests are for."""
    words: Annotated[tuple[str, ...], Positional, arg(metavar="NAME=VALUE ...")]
    """Roles and options, as after `--hosts kubernetes` of `ownloop run`."""
    certs: Path = Path("certs")
    """The folder of `ownloop certs`; new certificates are made there."""

    def run(self) -> int:
        """Prints them on standard output, and what to do next on standard error."""
        from controller.hosts.certificates import CERTIFICATE, make_certificates
        from controller.hosts.host_groups import parse_hosts
        from controller.hosts.starting.kubernetes_hosts import KubernetesHosts, as_yaml, manifests

        hosts = parse_hosts([self.cluster, *self.words])
        assert isinstance(hosts, KubernetesHosts)
        names = [name for role in hosts.addresses.values() for name in role]
        if hosts.tls:
            make_certificates(self.certs, [name for name in names if not (self.certs / name / CERTIFICATE).exists()])
        print(as_yaml(manifests(hosts, {name: self.certs / name for name in names})), end="")
        scheme = "" if hosts.tls else "tcp://"
        roles = [
            f"{role}={','.join(f'{scheme}{name}:{hosts.port}' for name in names)}"
            for role, names in hosts.addresses.items()
        ]
        if hosts.tls:
            print("keep this to yourself: it holds the private keys of all pods", file=sys.stderr)
        print(f"then: ownloop run RECIPE --hosts {' '.join(roles)}", file=sys.stderr)
        return 0
