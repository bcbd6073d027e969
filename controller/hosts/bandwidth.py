"""Whether two hosts reach each other on ports that neither has agreed on, and how fast. Runs in agents.

Collectives and weights travel so: one process opens any free port, and others connect to it.
"""

import socket
import threading
import time

_BLOCK = bytes(1 << 20)
_WAIT_S = 10.0


def open_server(address: str, num_bytes: int) -> int:
    """Serves `num_bytes` bytes to the first that connects, in a thread. Returns the port."""
    server = socket.create_server((address, 0), family=_family(address))
    server.settimeout(_WAIT_S)

    def serve() -> None:
        try:
            with server, server.accept()[0] as connection:
                connection.settimeout(_WAIT_S)
                for _ in range(num_bytes // len(_BLOCK)):
                    connection.sendall(_BLOCK)
        except OSError:
            pass  # the reader says what is wrong

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def read_from(address: str, port: int, timeout_s: float) -> float:
    """Reads all that such a server has. Returns bytes per second. Raises OSError if it cannot be reached in time."""
    with socket.create_connection((address, port), timeout=timeout_s) as connection:
        start, num_bytes, view = time.monotonic(), 0, memoryview(bytearray(1 << 20))
        while received := connection.recv_into(view):
            num_bytes += received
            if time.monotonic() - start > timeout_s:
                break
        return num_bytes / (time.monotonic() - start)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
