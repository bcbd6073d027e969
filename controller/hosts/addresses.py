"""Addresses of workers as users write them: `n1:26600` or `tls://n1:26600`, or `tcp://n1:26600` without TLS.

A worker owns ten ports, from the one that is written on, and listens on one of them. After a crash it takes the next,
because a controller that knew it cannot attach to the same address again (Monarch 0.7 keeps closed channels).
"""

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
        """As Monarch and users write it."""
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def on_port(self, port: int) -> "Address":
        """Another port of the same host."""
        return replace(self, port=port)


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
        accepted = pool.map(lambda port: accepts(address.on_port(port), timeout_s), ports)
        return next((address.on_port(port) for port, each in zip(ports, accepted, strict=True) if each), None)


def resolve(host: str) -> str:
    """The IP address of a host. Raises ValueError if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"host {host!r} has no address: {error.strerror}; check /etc/hosts and DNS") from None


def own_address_towards(host: str) -> str:
    """The IP address of this host that `host` sees: that of the interface on the way there."""
    ip = resolve(host)
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
