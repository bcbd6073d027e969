"""`ownloop worker --listen HOST:PORT`: lets controllers on other hosts start processes on this one."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from controller.commands.command import Commands, refuse
from controller.hosts.connections import (
    Address,
    apply,
    certificates_folder,
    is_loopback,
    parse_address,
    resolve,
    tls_settings,
)

_INSECURE = (
    "warning: this worker has no TLS (--insecure). Whoever reaches {address} can run any program as this user. "
    "Use it on a network that only you can reach."
)
_SENT = Path("-")


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("worker", help="let controllers start processes on this host", allow_abbrev=False)
    parser.add_argument(
        "--listen",
        required=True,
        metavar="HOST:PORT",
        help="this host's name as other hosts know it, and the first of ten ports; tcp://HOST:PORT is without TLS",
    )
    parser.add_argument(
        "--certs", type=Path, help="the folder that `ownloop certs` wrote; - for certificates on standard input"
    )
    parser.add_argument("--insecure", action="store_true", help="allow tcp://: whoever reaches the port runs programs")
    parser.add_argument(
        "--lifeline", metavar="HOST:PORT", help="end when the controller does that listens there; it has started this"
    )
    parser.add_argument(
        "--lost-after", type=float, default=20.0, metavar="SECONDS", help="of silence, for --lifeline (default: 20)"
    )
    parser.set_defaults(command=worker)


def worker(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serves until a signal ends it. Returns the exit status."""
    refuse(overrides)
    address = parse_address(options.listen)
    check_listens_here(address)
    from controller.hosts.worker_process import Owner, serve

    owner = None if options.lifeline is None else Owner(_lifeline(options.lifeline), options.lost_after)
    with ExitStack() as stack:
        if address.scheme == "tls":
            if options.insecure:
                raise ValueError(f"--insecure is for tcp:// addresses; {address} has TLS")
            certs = _sent_certificates(stack) if options.certs == _SENT else certificates_folder(options.certs)
            from controller.hosts.certificates import own_certificates

            # sbatch passes the controller's environment on, with the controller's own certificate.
            apply(tls_settings(own_certificates(certs, address.host)), override=options.certs is not None)
        elif not is_loopback(resolve(address.host)):
            if not options.insecure:
                raise ValueError(
                    f"--listen is {address}, which has no TLS: whoever reaches it can run any program here. Listen on "
                    f"{address.host}:{address.port}, with certificates of `ownloop certs`, or accept it with --insecure"
                )
            print(_INSECURE.format(address=address), file=sys.stderr, flush=True)
        return serve(address, lambda text: print(text, flush=True), owner)


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
    from controller.hosts.certificates import unpack
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
