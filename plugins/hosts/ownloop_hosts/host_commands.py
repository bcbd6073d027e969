"""`ownloop worker`, `doctor` and `certs`: a host that takes part in runs, whether hosts would do, and their TLS."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from controller.commands.command_line import FAILED
from ownloop_hosts.connections import (
    Address,
    apply,
    certificates_folder,
    is_loopback,
    parse_address,
    resolve,
    tls_settings,
)
from rl.system.disk import check_temporary_folder
from rl.system.hardware import allow_open_files

if TYPE_CHECKING:
    from ownloop_hosts.examination import Examination

_INSECURE = (
    "warning: this worker has no TLS (--insecure). Any process that reaches {address} can run programs as this user. "
    "Use it on a network that only you can reach."
)
_SENT = Path("-")


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Lets controllers start processes on this host."""

    listen: Annotated[str, arg(metavar="HOST:PORT")]
    """This host's name as other hosts know it, and the first of ten ports; tcp://HOST:PORT is without TLS."""
    certs: Path | None = None
    """The folder that `ownloop certs` wrote; - for certificates on standard input."""
    insecure: bool = False
    """Allow tcp://, with which anyone who reaches the port can run programs."""
    lifeline: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """End when the controller does that listens there; it has started this worker."""
    lost_after: Annotated[float, arg(metavar="SECONDS")] = 20.0
    """Seconds of silence after which the controller counts as lost; for --lifeline."""

    def run(self) -> int:
        """Serves until a signal ends it."""
        address = parse_address(self.listen)
        check_listens_here(address)
        from ownloop_hosts.worker_process import Owner, serve

        check_temporary_folder()
        allow_open_files()
        owner = None if self.lifeline is None else Owner(_lifeline(self.lifeline), self.lost_after)
        with ExitStack() as stack:
            if address.scheme == "tls":
                self._use_tls(address, stack)
            elif not is_loopback(resolve(address.host)):
                if not self.insecure:
                    raise ValueError(
                        f"--listen is {address}, which has no TLS: any process that reaches it can run programs here. "
                        f"Listen on {address.host}:{address.port}, with certificates of `ownloop certs`, or accept it "
                        "with --insecure"
                    )
                print(_INSECURE.format(address=address), file=sys.stderr, flush=True)
            return serve(address, lambda text: print(text, flush=True), owner)

    def _use_tls(self, address: Address, stack: ExitStack) -> None:
        """Has Monarch use this host's certificates."""
        if self.insecure:
            raise ValueError(f"--insecure is for tcp:// addresses; {address} has TLS")
        certs = _sent_certificates(stack) if self.certs == _SENT else certificates_folder(self.certs)
        from ownloop_hosts.certificates import own_certificates

        # sbatch passes the controller's environment on, with the controller's own certificate.
        apply(tls_settings(own_certificates(certs, address.host)), override=self.certs is not None)


def check_listens_here(address: Address) -> None:
    """Raises ValueError unless the address is one of this host's that others can use."""
    import psutil

    ip = resolve(address.host)
    own = {each.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for each in addresses}
    if ip not in own and not is_loopback(ip):
        raise ValueError(f"--listen names {address.host}, whose address {ip} is none of this host's")
    if is_loopback(ip) and address.host not in ("localhost", ip):
        raise ValueError(
            f"--listen names {address.host}, which is {ip} on this host: other hosts could not reach it. Name another "
            "address of this host, or correct /etc/hosts"
        )


def _sent_certificates(stack: ExitStack) -> Path:
    """A folder with the certificates that were sent, which is removed with the worker."""
    from ownloop_hosts.certificates import unpack
    from rl.system.disk import OwnedFolder

    folder = OwnedFolder("ownloop-certs-", in_memory=True)
    stack.callback(folder.remove)
    unpack(sys.stdin.buffer.read(), folder.path)
    return folder.path


def _lifeline(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--lifeline is {text!r}; write HOST:PORT")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Checks the hosts of a run before it: what they are, how fast they reach each other, what would fail."""

    hosts: Annotated[tuple[str, ...], arg(metavar="WORD ...")]
    """As for `ownloop run`: ROLE=HOST:PORT,HOST:PORT ..., or ssh ROLE=HOST,... ..."""
    certs: Path | None = None
    """The folder of this host's certificates."""
    mb: int = 64
    """How many MB each pair of hosts sends."""

    def run(self) -> int:
        """Prints what was found. Returns 1 if something would fail."""
        from controller.launching.hosts import parse_hosts
        from ownloop_hosts.host_groups import HostGroups, WorkerHosts, prepare

        hosts = parse_hosts(self.hosts)
        if not isinstance(hosts, HostGroups):
            raise ValueError(f"--hosts is {' '.join(self.hosts)}; name hosts to examine, as in trainer=HOST:PORT")
        if isinstance(hosts, WorkerHosts):
            hosts = replace(hosts, certs=self.certs)
        elif self.certs is not None:
            raise ValueError(f"--certs is for workers that run already; {self.hosts[0]} makes certificates of its own")
        prepare(hosts)  # before Monarch is imported
        from ownloop_hosts.examination import examine

        found = asyncio.run(examine(hosts, self.mb << 20))
        for line in report(found):
            print(line)
        return FAILED if found.problems else 0


def report(found: "Examination") -> list[str]:
    """What was found, in lines for a terminal."""
    from ownloop_hosts.examination import CONTROLLER

    rows = [["host", "worker", "address", "torch", "GPUs", "memory", "clock"]]
    for host in found.hosts:
        facts = host.facts
        gpus = f"{len(facts.gpus)} x {facts.gpu_kind}" if facts.gpus else "none"
        memory, clock = f"{facts.memory_bytes / 1e9:.0f} GB", f"{found.clocks.get(host.name, 0.0):+.3f} s"
        rows.append([host.name, str(host.worker), facts.address, facts.versions["torch"], gpus, memory, clock])
    names = [CONTROLLER, *(host.name for host in found.hosts)]
    speeds = [["MB/s from \\ to", *names]]
    for sender in names:
        rates = [found.bytes_per_s.get((sender, receiver)) for receiver in names]
        speeds.append([sender, *("" if rate is None else f"{rate / 1e6:.0f}" for rate in rates)])
    problems = [f"would fail: {problem}" for problem in found.problems] or ["nothing was found that would fail"]
    return [*_table(rows), "", *_table(speeds), "", *problems]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True, kw_only=True)
class Certs:
    """Makes TLS certificates for the hosts of a lab."""

    hosts: Annotated[tuple[str, ...], Positional, arg(metavar="HOST ...")]
    """A host's name as the others know it, and its other names and addresses after commas: n1,10.0.0.1."""
    to: Path = Path("certs")
    """Where the certificates go."""

    def __post_init__(self) -> None:
        """Raises ValueError if no host is named."""
        if not self.hosts:
            raise ValueError("HOST is missing: a host's name as the others know it; see ownloop certs --help")

    def run(self) -> int:
        """Makes the certificates."""
        from ownloop_hosts.certificates import CA_KEY, make_certificates

        for folder in make_certificates(self.to, self.hosts):
            print(f"{folder}: copy this folder to {folder.name} as ~/.config/ownloop/certs")
        print(f"{self.to / CA_KEY} lets further hosts in; keep it to yourself. Anyone who has a host's key.pem can run")
        print("any program on every host of this authority.")
        return 0
