"""A connection that tells what runs on another host whether its controller still runs. Nothing is sent over it.

A host's agent holds one, and so does a worker that the controller itself has started.

The kernel closes it when the controller's process ends, however that ends, and answers for a process that is busy or
stopped. So a controller whose event loop is blocked for minutes keeps its processes, and one that was killed loses them
at once. If the network is cut, the connection ends after `lost_after_s`, and if the controller gives the host up, too.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

_PROBES = 3


class Lifeline:
    """The controller's end."""

    def __init__(self, address: str, *, for_many: bool = False) -> None:
        """Listens at an address of this host until one process holds it, or with `for_many` until it is cut."""
        self._for_many = for_many
        self._server = socket.create_server((address, 0), family=_family(address))
        self.end = (address, int(self._server.getsockname()[1]))
        """Where the agent connects to."""
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, name="lifeline", daemon=True).start()

    def cut(self) -> None:
        """Tells those that hold it to end everything. May be called again."""
        for end in (self._server, *self._connections):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self._connections.append(self._server.accept()[0])
            while self._for_many:
                self._connections.append(self._server.accept()[0])
            self._server.close()


def hold(end: tuple[str, int], lost_after_s: float, on_end: Callable[[], None]) -> None:
    """The other end: has `on_end` run in a thread once the controller is gone. Raises OSError if it is already."""
    connection = socket.create_connection(end, timeout=lost_after_s)
    connection.settimeout(None)
    every_s = max(1, round(lost_after_s / (_PROBES + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)

    def wait() -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1)
        on_end()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
