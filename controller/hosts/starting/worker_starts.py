"""Workers that a run starts itself: their command line, and what their output says about where they listen.

Such a worker holds the run's lifeline, so it ends with the controller, however that ends.
"""

import asyncio
import re
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from controller.hosts.addresses import Address, accepts, parse_address
from controller.hosts.settings import forwarded_env

_LISTENING = re.compile(r"listening on (?P<address>\S+://\S+) \(process \d+\)")
_ENDED = re.compile(r"worker on (?P<node>\S+) ended with status (?P<status>\d+)")
_LAST_LINES = 8
_POLL_S = 0.1
_PROBE_S = 1.0


@dataclass(slots=True)
class WorkerOutput:
    """What workers have printed."""

    name: str
    """Of the host or the job, for the controller's log."""
    listening: dict[str, Address] = field(default_factory=dict[str, Address])
    """By host, where its worker listens."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """By host, the status of a worker that has ended, where that is known."""
    last_lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=_LAST_LINES))

    def take(self, line: str) -> None:
        """One line. It goes to this process's own output as well, which is the controller's log."""
        if not (line := line.strip()):
            return
        print(f"[{self.name}] {line}", flush=True)
        self.last_lines.append(line)
        if found := _LISTENING.search(line):
            address = parse_address(found["address"])
            self.listening[address.host] = address
        if found := _ENDED.search(line):
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
        *(() if lifeline is None else ("--lifeline", lifeline, "--lost-after", f"{lost_after_s:g}")),
    ]
    return [*command, *(("--insecure",) if address.scheme == "tcp" else ("--certs", certs))]


def environment(own: Sequence[tuple[str, str]] = ()) -> list[str]:
    """`NAME=value` for `env`, quoted for a shell: what the controller's processes need, and the user's own."""
    return [f"{name}={shlex.quote(value)}" for name, value in {**forwarded_env(), **dict(own)}.items()]


async def until_it_accepts(
    address: Callable[[], Address | None], end: float, has_ended: Callable[[], str | None]
) -> Address:
    """Waits until a worker has said where it listens, and does. `end` is a time of `time.monotonic`.

    Raises ValueError with what `has_ended` returns once it is not None, and if it takes too long.
    """
    while True:
        found = address()
        if found is not None and await asyncio.to_thread(accepts, found, _PROBE_S):
            return found
        if (reason := has_ended()) is not None:
            raise ValueError(reason)
        if time.monotonic() > end:
            if found is None:
                raise ValueError("no worker has begun to listen in time")
            raise ValueError(f"its worker listens on {found}, and cannot be reached there; does a firewall allow it?")
        await asyncio.sleep(_POLL_S)
