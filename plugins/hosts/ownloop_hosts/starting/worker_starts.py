"""Workers that a run starts itself: their command, their certificates, and what they print about where they listen.

Such a worker holds the run's lifeline, so it ends with the controller, however that ends. Its certificate comes from an
authority that this process makes for this run alone. The authority's folder is in memory. It is removed when the
process ends; what a killed process left is removed by the next one.

Programs of a cluster, such as `sbatch` or `kubectl`, are the user's own and run as the user would run them.
"""

import asyncio
import contextlib
import functools
import ipaddress
import re
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ownloop_hosts.certificates import make_certificates
from ownloop_hosts.connections import Address, accepts, forwarded_env, is_loopback, parse_address
from ownloop_hosts.host_groups import Connectable
from rl.system.disk import OwnedFolder

_LISTENING = re.compile(r"listening on (?P<address>\S+://\S+) \(process \d+\)")
_ENDED = re.compile(r"worker on (?P<node>\S+) ended with status (?P<status>\d+)")
_LAST_LINES = 8
_POLL_S = 0.1
_PROBE_S = 1.0


@dataclass(slots=True)
class WorkerOutput:
    """What workers have printed."""

    name: str
    """The name of the host or the job in the controller's log."""
    listening: dict[str, Address] = field(default_factory=dict[str, Address])
    """Host -> the address at which its worker listens."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """By host, the status of a worker that has ended, where that is known."""
    last_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_LAST_LINES))

    def take(self, line: str) -> None:
        """One line. It goes to this process's own output as well, which is the controller's log."""
        if not (line := line.strip()):
            return
        print(f"[{self.name}] {line}", flush=True)
        self.last_lines.append(line)
        if found := _LISTENING.search(line):  # printed by `ownloop worker` once it accepts connections
            address = parse_address(found["address"])
            self.listening[address.host] = address
        if found := _ENDED.search(line):  # printed by the script of Slurm
            self.ended[found["node"]] = int(found["status"])

    @property
    def end(self) -> str:
        """The last lines, for an error."""
        return "\n".join(self.last_lines) or "it has printed nothing"


def worker_command(
    address: Address, lifeline: str | None, lost_after_s: float, *, python: str = "", certs: str = "-"
) -> list[str]:
    """The command that is a worker. `lifeline` and `certs` are words of a shell; the others are quoted for it."""
    command = [
        *(shlex.quote(word) for word in (python or sys.executable, "-m", "controller.commands.cli", "worker")),
        *("--listen", str(address) if address.scheme == "tcp" else f"{address.host}:{address.port}"),
        # without a lifeline a worker runs until a person ends it
        *(() if lifeline is None else ("--lifeline", lifeline, "--lost-after", f"{lost_after_s:g}")),
    ]
    # never without TLS by accident
    return [*command, *(("--insecure",) if address.scheme == "tcp" else ("--certs", certs))]


def environment(own: Sequence[tuple[str, str]] = ()) -> list[str]:
    """`NAME=value` for `env`, quoted for a shell: what the controller's processes need, and the user's own."""
    # the user's own come last, and win
    return [f"{name}={shlex.quote(value)}" for name, value in {**forwarded_env(), **dict(own)}.items()]


async def until_it_accepts(
    address: Callable[[], Address | None], end: float, has_ended: Callable[[], str | None]
) -> Address:
    """Waits until a worker has said where it listens, and does. `end` is a time of `time.monotonic`.

    Raises ValueError with what `has_ended` returns once it is not None, and if it takes too long.
    """
    while True:
        found = address()
        # a port that is open answers; what is printed may be too early
        if found is not None and await asyncio.to_thread(accepts, found, _PROBE_S):
            return found
        if (reason := has_ended()) is not None:
            raise ValueError(reason)
        if time.monotonic() > end:
            if found is None:
                raise ValueError("no worker has begun to listen in time")
            raise ValueError(f"its worker listens on {found}, and cannot be reached there; does a firewall allow it?")
        await asyncio.sleep(_POLL_S)


_LAST_CHARACTERS = 2000


async def output_of(command: Sequence[str], text: str = "", within_s: float = 30.0) -> str:
    """What a program prints, given `text` on its standard input.

    Raises ValueError, with its output, if it fails, if it takes too long, and if there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise ValueError(f"there is no program {command[0]!r} here; it is needed for these hosts")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        output, errors = await asyncio.wait_for(process.communicate(text.encode()), within_s)
    except TimeoutError:
        # a hanging program must not hang the run
        raise ValueError(f"`{shlex.join(command)}` has not ended within {within_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()  # no zombie stays
    if process.returncode:
        # the end of an error says the most
        said = (errors or output).decode(errors="replace").strip()[-_LAST_CHARACTERS:]
        raise ValueError(f"`{shlex.join(command)}` ended with status {process.returncode}: {said or 'it said nothing'}")
    return output.decode(errors="replace")


async def end_process(process: asyncio.subprocess.Process, each_s: float) -> None:
    """Returns once a process has ended: by itself, or by signals of growing strength, each after `each_s`."""
    for end in (None, process.terminate, process.kill):
        if end is not None:
            with contextlib.suppress(ProcessLookupError):
                end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), each_s)
            return


class WithRunCertificates(Connectable):
    """Hosts on which the run starts the workers, so their certificates are made for it."""

    __slots__ = ()

    tls: bool

    @property
    def certs(self) -> Path | None:
        """The folder of the controller's certificate; None without TLS."""
        return controller_certificates() if self.tls else None  # the same for every allocation of this process

    @property
    def uses_tls(self) -> bool:
        """Whether the workers have TLS."""
        return self.tls


def controller_certificates() -> Path:
    """The folder with the certificate of this process. It is for every address of this host."""
    import psutil

    found = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    # loopback last; sorted, so that the name is always the same
    own = sorted(filter(_is_usable, found), key=lambda ip: (is_loopback(ip), ip))
    return _made(",".join(own), "controller")


def worker_certificates(host: str) -> Path:
    """The folder with the certificate of a worker on this host, as the controller calls it."""
    return _made(host, "workers")


@functools.cache
def _folder() -> OwnedFolder:
    return OwnedFolder("ownloop-certs-", in_memory=True)  # private keys stay off the disk


@functools.cache
def _made(names: str, kind: str) -> Path:
    (own,) = make_certificates(_folder().path, [names], below=kind)
    return own


def _is_usable(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_link_local  # needs a zone, which no certificate can name
    except ValueError:  # a MAC address, or an IPv6 address of one interface
        return False
