"""How hosts find and reach each other: addresses of workers, lifelines, ports, and Monarch's settings for them.

An address is what users write: `n1:26600` or `tls://n1:26600`, or `tcp://n1:26600` without TLS. A worker owns ten
ports, from the one that is written on, and listens on one of them. After a crash it takes the next, because a
controller that knew it cannot attach to the same address again (Monarch 0.7 keeps closed channels).

A lifeline is a connection over which nothing is sent. As long as it exists, the controller runs. A host's agent
holds one, and so does a worker that the controller itself started:

    controller                     host
    Lifeline  <--- connection ---  hold: on_end() when the connection ends

The kernel closes it when the controller's process ends, however that ends, and answers for a process that is busy or
stopped. So a controller whose event loop is blocked for minutes keeps its processes, and one that was killed loses them
at once. If the network is cut, the connection ends after `lost_after_s`.
"""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rl.checks import check_known

DEFAULT_PORT = 26600
NUM_PORTS = 10
_PROBE_S = 3.0
_ADDRESS = re.compile(r"(?:(?P<scheme>\w+)://)?(?P<host>\[[^\]]+\]|[^:/\s]+)(?::(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens."""

    scheme: Literal["tls", "tcp"]
    host: str
    port: int

    def __str__(self) -> str:
        """The address as Monarch and users write it."""
        return f"{self.scheme}://{host_and_port(self.host, self.port)}"


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """The address that a user wrote. Raises ValueError naming what is accepted."""
    found = _ADDRESS.fullmatch(text.strip())
    port = int((found and found["port"]) or DEFAULT_PORT)
    if found is None or port + NUM_PORTS > 65536:
        raise ValueError(f"address of a worker is {text!r}; write HOST:PORT, for example n1:{DEFAULT_PORT}")
    scheme = found["scheme"] or "tls"
    check_known("scheme of a worker's address", scheme, ("tls", "tcp"))
    return Address("tcp" if scheme == "tcp" else "tls", found["host"].strip("[]"), port)


def listening(address: Address, timeout_s: float = _PROBE_S) -> Address | None:
    """The address with that of its ten ports on which something accepts connections; None if there is none.

    Raises ValueError if the host's name has no address.
    """
    resolve(address.host)
    ports = range(address.port, address.port + NUM_PORTS)
    with ThreadPoolExecutor(NUM_PORTS) as pool:
        accepted = pool.map(lambda port: accepts(replace(address, port=port), timeout_s), ports)
        return next((replace(address, port=port) for port, each in zip(ports, accepted, strict=True) if each), None)


def resolve(host: str) -> str:
    """The IP address of a host. Raises ValueError if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"host {host!r} has no address: {error.strerror}; check /etc/hosts and DNS") from None


def own_address_towards(host: str) -> str:
    """The IP address of this host that `host` sees: that of the interface on the way there."""
    ip = resolve(host)
    with socket.socket(family_of(ip), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))  # sends nothing
        except OSError as error:
            raise ValueError(f"there is no route from here to host {host!r} ({ip}): {error.strerror}") from None
        return str(probe.getsockname()[0])


def is_loopback(ip: str) -> bool:
    """Whether only processes of this host can reach it."""
    return ip == "::1" or ip.startswith("127.")


def accepts(address: Address, timeout_s: float) -> bool | None:
    """Whether something accepts connections there; None if the host does not answer at all."""
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout_s):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


_PROBES = 3


class Lifeline:
    """The controller's end."""

    def __init__(self, address: str, *, for_many: bool = False) -> None:
        """Listens at an address of this host until one process holds it, or with `for_many` until it is cut."""
        self._for_many = for_many
        self._server = socket.create_server((address, 0), family=family_of(address))
        self.end = (address, int(self._server.getsockname()[1]))
        """Where the agent connects to."""
        self._connections: list[socket.socket] = []
        self._is_cut = False
        threading.Thread(target=self._accept, name="lifeline", daemon=True).start()

    def cut(self) -> None:
        """Closes it, so that each holder ends everything. May be called again."""
        self._is_cut = True
        for end in (self._server, *self._connections):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._for_many or not self._connections:
                self._connections.append(self._server.accept()[0])
                if self._is_cut:  # before the new connection was in the list
                    self.cut()
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


def family_of(address: str) -> socket.AddressFamily:
    """The family of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


_BLOCK = bytes(1 << 20)
_WAIT_S = 10.0


def open_server(address: str, num_bytes: int) -> int:
    """Serves `num_bytes` bytes to the first that connects, in a thread. Returns the port."""
    server = socket.create_server((address, 0), family=family_of(address))
    server.settimeout(_WAIT_S)

    def serve() -> None:
        with contextlib.suppress(OSError), server:  # the reader says what is wrong
            connection, _ = server.accept()
            server.close()  # before the first byte: a reader that has them all cannot reach it again
            with connection:
                connection.settimeout(_WAIT_S)
                for _ in range(num_bytes // len(_BLOCK)):
                    connection.sendall(_BLOCK)

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


SETTINGS: Mapping[str, str] = {
    # A host that was out of reach for minutes can be attached to again. By default its address is lost for good.
    "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "10m",
    "HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "15s",
}
_TLS_VARIABLES = {"HYPERACTOR_TLS_CERT": "cert.pem", "HYPERACTOR_TLS_KEY": "key.pem", "HYPERACTOR_TLS_CA": "ca.pem"}
_CERTIFICATES_VARIABLE = "OWNLOOP_CERTS"


def certificates_folder(chosen: Path | None) -> Path:
    """The folder of this host's certificates: the chosen one, that of OWNLOOP_CERTS, or one in the user's settings."""
    default = Path(os.environ.get("XDG_CONFIG_HOME", "~/.config")).expanduser() / "ownloop" / "certs"
    return (chosen or Path(os.environ.get(_CERTIFICATES_VARIABLE, default))).absolute()


def tls_settings(own_folder: Path) -> Mapping[str, str]:
    """The variables with which Monarch speaks TLS as the host whose certificate is in `own_folder`."""
    return {variable: str(own_folder / name) for variable, name in _TLS_VARIABLES.items()}


def forwarded_env() -> Mapping[str, str]:
    """Variables of the controller that its processes need on any host: where a user's own modules are."""
    return {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}


def apply(settings: Mapping[str, str], *, override: bool = False) -> None:
    """Sets variables for this process and its children. Without `override`, what the user has set stays."""
    for name, value in settings.items():
        if override or name not in os.environ:
            os.environ[name] = value
