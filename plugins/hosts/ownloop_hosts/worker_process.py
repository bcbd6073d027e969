"""A worker: the process on a host that starts other processes there for controllers, and outlives them.

`serve` keeps one alive: when it crashes, the next one listens on the next port (see addresses.py).
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from ownloop_hosts.connections import NUM_PORTS, SETTINGS, Address, apply, hold

_PR_SET_PDEATHSIG = 1
_MOST_CRASHES = 5
_CRASH_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Owner:
    """The controller that has started this worker, and without which it ends."""

    lifeline: tuple[str, int]
    """The address and port of the controller's lifeline; see lifeline.py."""
    lost_after_s: float
    """Seconds of silence after which the controller is gone."""

    def hold(self) -> None:
        """Has this process end once the controller is gone. Raises ValueError if it cannot be reached."""
        try:
            hold(self.lifeline, self.lost_after_s, lambda: os.kill(os.getpid(), signal.SIGTERM))
        except OSError as error:
            host, port = self.lifeline
            raise ValueError(
                f"the controller cannot be reached at {host} on port {port} from {socket.gethostname()}: {error}; let "
                "hosts and the controller reach each other on all ports above 1024"
            ) from None


def serve(address: Address, tell: Callable[[str], None], owner: Owner | None = None) -> int:
    """Runs workers until a signal or the owner ends this process, and returns 0; 1 if they crash again and again.

    Raises ValueError if none of the worker's ports is free, or if the owner cannot be reached.
    """
    if owner is not None:
        owner.hold()
    crashes: list[float] = []
    stopping: list[int] = []
    while True:
        current = _next_address(address)
        worker = _start(current)
        tell(f"listening on {current} (process {worker.pid})")

        def stop(number: int, _frame: FrameType | None, worker: subprocess.Popen[bytes] = worker) -> None:
            stopping.append(number)
            worker.terminate()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)
        status = worker.wait()
        if stopping:
            return 0
        now = time.monotonic()
        crashes = [at for at in crashes if at > now - _CRASH_WINDOW_S] + [now]
        if len(crashes) > _MOST_CRASHES:
            tell(f"the worker ended {len(crashes)} times in {_CRASH_WINDOW_S:g} s, the last time with status {status}")
            return 1
        tell(f"the worker ended with status {status}; everything that it had started has ended with it")


def run_worker(address: str) -> None:
    """Is a worker, in this process, until the process ends."""
    from monarch.actor import enable_transport, run_worker_loop_forever

    if address.startswith("tls://"):
        enable_transport("tls")
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def _start(address: Address) -> subprocess.Popen[bytes]:
    # Its own session, so that Ctrl-C in a terminal reaches the parent alone, which ends it in order.
    command = [sys.executable, "-m", "ownloop_hosts.worker_process", str(address)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def _next_address(address: Address) -> Address:
    """The first free port after the one that the last worker of this address had."""
    used = _last_port_file(address)
    last = address.port - 1
    with contextlib.suppress(OSError, ValueError):
        last = int(used.read_text())
    ports = [address.port + (last + 1 + offset - address.port) % NUM_PORTS for offset in range(NUM_PORTS)]
    for port in ports:
        if _is_free(address.host, port):
            used.parent.mkdir(parents=True, exist_ok=True)
            used.write_text(str(port))
            return replace(address, port=port)
    raise ValueError(f"none of the ports {ports[0]} to {ports[0] + NUM_PORTS - 1} of {address.host} is free")


def _last_port_file(address: Address) -> Path:
    # The host's name is part of it because home folders may be shared.
    state = Path(os.environ.get("XDG_STATE_HOME", "~/.local/state")).expanduser()
    return state / "ownloop" / f"worker-{socket.gethostname()}-{address.port}"


def _is_free(host: str, port: int) -> bool:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


if __name__ == "__main__":
    # It ends with its parent, however that ends, and every process that it started ends with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the parent has ended")
    apply(SETTINGS)
    run_worker(sys.argv[1])
