"""`SshHosts`: hosts on which the run starts `ownloop worker` itself, over the user's own `ssh`, and ends it.

    ownloop run grpo --hosts ssh trainer=n1,n2 generator=n3
    hosts=SshHosts({"trainer": ("n1", "n2"), "generator": ("n3",)})

Certificates are made for the run and sent through ssh, so nothing has to be prepared on a host but its Python. A
worker ends with the run, and when the controller is killed: it holds the controller's lifeline. Nothing of Monarch's
`SSHJob` is used: it speaks plain TCP, knows no lifeline and does not say why a host failed.
"""

import asyncio
import contextlib
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.launching.hosts import Tell
from ownloop_hosts.certificates import packed
from ownloop_hosts.connections import (
    DEFAULT_PORT,
    Address,
    Lifeline,
    host_and_port,
    own_address_towards,
    parse_address,
)
from ownloop_hosts.host_groups import Allocation, Groups
from ownloop_hosts.starting.worker_starts import (
    WithRunCertificates,
    WorkerOutput,
    end_process,
    environment,
    until_it_accepts,
    worker_certificates,
    worker_command,
)
from rl.checks import check_above_zero

# no leading hyphen: ssh would take it for an option
_HOST = re.compile(r"(?:[\w.-]+@)?(?:[A-Za-z0-9][\w.-]*|[0-9a-fA-F:]+)")
_END_S = 3.0
# A terminal's password prompt would never end, and a host that went away would look as if it ran.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHosts(WithRunCertificates):
    """Hosts that `ssh HOST` reaches without a password, and that have this Python and ownloop at the same paths."""

    groups: Mapping[str, Sequence[str]] = field(kw_only=False)
    """The hosts, `HOST` or `USER@HOST`, by the name of the role. Other hosts know them by these names, too."""
    port: int = DEFAULT_PORT
    """The first of the ten ports of each worker."""
    python: str = ""
    """The interpreter of the workers; empty for the controller's. What they start has the controller's in any case."""
    directory: str = ""
    """The working directory of all processes there; empty for the controller's."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of all processes there. PYTHONPATH is the controller's by itself."""
    ssh: Sequence[str] = ("ssh",)
    """The program and its own options, such as ("ssh", "-J", "gate")."""
    tls: bool = True
    """False leaves TLS out: any process that reaches a worker's port can then run any program as your user."""
    start_within_s: float = 60.0
    """Seconds that a worker has to start."""
    lost_after_s: float = 20.0
    """Seconds of silence after which a host is lost, and a worker ends whose controller is silent."""

    def __post_init__(self) -> None:
        """Raises ValueError for names that are none, a host that a group has twice, and options that cannot be."""
        check_above_zero(lost_after_s=self.lost_after_s, start_within_s=self.start_within_s)
        for group, hosts in self.groups.items():
            if not hosts or len(set(hosts)) < len(hosts):
                raise ValueError(f"hosts of {group!r} are {list(hosts)}; name at least one, and each once")
            for host in hosts:
                if not _HOST.fullmatch(host):
                    raise ValueError(f"a host of {group!r} is {host!r}; write HOST or USER@HOST, as for ssh")
        if not self.ssh:
            raise ValueError('ssh is empty; give the program and its options, such as ("ssh", "-J", "gate")')
        parse_address(f"n1:{self.port}")

    def allocation(self, tell: Tell) -> Allocation:
        """Starts nothing yet."""
        return _SshWorkers(self, tell)


class _SshWorkers:
    """The workers of one run."""

    def __init__(self, hosts: SshHosts, tell: Tell) -> None:
        self._hosts = hosts
        self._tell = tell
        self._running: dict[str, _SshWorker] = {}

    async def workers(self) -> Groups:
        # a host with several roles has one worker
        hosts = list(dict.fromkeys(host for group in self._hosts.groups.values() for host in group))
        missing = [host for host in hosts if host not in self._running or not self._running[host].runs]
        is_first = not self._running  # after that, a host that is missing may stay missing
        if missing:
            self._tell(f"starting workers over ssh on {', '.join(missing)}")
        started = await asyncio.gather(*map(self._start, missing), return_exceptions=True)
        problems = [error for error in started if isinstance(error, BaseException)]
        # a fault of this program, and not of a host
        if unexpected := [error for error in problems if not isinstance(error, ValueError)]:
            raise unexpected[0]
        if problems and is_first:
            raise ValueError("\n".join(map(str, problems)))
        for error in problems:  # the host was lost, and the run can continue without it
            self._tell(str(error))
        return {
            name: tuple(self._running[host].address for host in group) for name, group in self._hosts.groups.items()
        }

    async def revived(self) -> Groups:
        return await self.workers()

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self._running.values()))

    async def _start(self, host: str) -> None:
        old, new = self._running.get(host), _SshWorker(self._hosts, host)
        if old is not None:
            await old.stop()
            new.address = old.address  # until it is known, so that this host counts as one that was there
        self._running[host] = new
        await new.start()


class _SshWorker:
    """One worker, and the `ssh` that runs it."""

    def __init__(self, hosts: SshHosts, destination: str) -> None:
        scheme = "tls" if hosts.tls else "tcp"
        self._hosts = hosts
        self._destination = destination
        self._first = Address(scheme, destination.rpartition("@")[2], hosts.port)  # without the user's name
        self.address = self._first
        """Where it listens, once it has started."""
        self._output = WorkerOutput(destination)
        self._lifeline: Lifeline | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Whether its ssh runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Returns once it listens. Raises ValueError with the host's name and the last lines of ssh otherwise."""
        program = self._hosts.ssh[0]
        if shutil.which(program) is None:
            raise ValueError(f"ssh is {program!r}, which is no program here; install it, or name another one")
        try:
            self._lifeline = Lifeline(own_address_towards(self._first.host))
            command = self._command(host_and_port(*self._lifeline.end))
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the controller alone, which ends everything in order
            )
            self._reader = asyncio.create_task(self._read())
            await self._send_certificates()
            end = time.monotonic() + self._hosts.start_within_s
            listening = self._output.listening
            # the address as the worker prints it: port 0 takes any
            self.address = await until_it_accepts(lambda: listening.get(self._first.host), end, self._has_ended)
        except BaseException as error:
            await self.stop()
            if isinstance(error, ValueError):  # what ssh said explains most failures
                last = "" if self._process is None else f". The last lines of ssh:\n{self._output.end}"
                raise ValueError(f"{self._destination}: {error}{last}") from None
            raise

    async def stop(self) -> None:
        """Ends the worker by its lifeline, and its ssh with it."""
        if self._lifeline is not None:
            self._lifeline.cut()
        if self._process is None:
            return
        await end_process(self._process, _END_S)  # its lifeline is cut
        if self._reader is not None:
            await self._reader  # ends with the process's output

    def _command(self, lifeline: str) -> list[str]:
        hosts = self._hosts
        worker = worker_command(self._first, shlex.quote(lifeline), hosts.lost_after_s, python=hosts.python)
        # exec: ssh's own end reaches the worker
        there = ["cd", shlex.quote(hosts.directory or str(Path.cwd())), "&&", "exec", "env"]
        return [*hosts.ssh, *_SSH_OPTIONS, "--", self._destination,
                " ".join([*there, *environment(tuple(hosts.env.items())), *worker])]  # fmt: skip

    async def _send_certificates(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and its output says why
            if self._hosts.tls:
                self._process.stdin.write(packed(worker_certificates(self._first.host)))
                await self._process.stdin.drain()
            self._process.stdin.close()  # the worker waits for the end of its input
            await self._process.stdin.wait_closed()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._output.take(line.decode(errors="replace"))

    def _has_ended(self) -> str | None:
        # only when its last lines have been read
        if self._process is None or self._process.returncode is None or not (self._reader and self._reader.done()):
            return None
        return f"no worker could be started there: {self._hosts.ssh[0]} ended with status {self._process.returncode}"
