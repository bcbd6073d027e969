"""Links: process groups of two processes each, through which weights travel from host to host.

A group that has lost a message is of no use any more. With a group for each pair the other pairs stay intact, and a new
group takes milliseconds. The receiving process holds the store through which the two find each other. Neither the store
nor the group asks who connects, and neither runs code that arrives: both are for networks that one trusts.
"""

import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from rl.weights.versions import WeightsError

LINK_TIMEOUT_S = 20.0
"""The usual `LinkAddress.timeout_s`: an interruption of ten seconds is survived."""

_SENDER, _RECEIVER = 0, 1


class LinkError(WeightsError):
    """The other end of a link is gone, or does not take or send what it should."""


class Pending(Protocol):
    """A message on its way; torch's `Work` is one."""

    def wait(self) -> object:
        """Returns when the message has arrived or has been taken. Raises RuntimeError if it is lost."""
        ...


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a link ends, and its name there."""

    ip: str
    """Of the receiving host, as others reach it."""
    port: int
    """Of the receiving process's `Rendezvous`."""
    name: str
    """Used once: a link that replaces a broken one has another name."""
    timeout_s: float
    """How long the link may carry nothing, or take to be made."""


def rank_link(address: LinkAddress, rank: int) -> LinkAddress:
    """The link of one trainer rank to the first host, which has one for each."""
    return replace(address, name=f"{address.name}/{rank}")


class Link:
    """One end of a link."""

    def __init__(self, store: dist.Store, address: LinkAddress, own_ip: str, own_end: int) -> None:
        """Use `connect`, or `Rendezvous.accept`."""
        gloo: Any = dist.ProcessGroupGloo  # its type stubs lack most of it
        options = gloo._Options()
        # By its address, because a host's own name may resolve to its loopback address, where nobody else connects.
        options._devices = [gloo.create_device(hostname=own_ip)]
        options._timeout = timedelta(seconds=address.timeout_s)
        try:
            self._group: Any = gloo(dist.PrefixStore(address.name, store), own_end, 2, options)
        except RuntimeError as error:
            raise LinkError(f"no link to {address.ip} within {address.timeout_s:g} s: {_first_line(error)}") from error
        self._other = 1 - own_end

    def send(self, data: torch.Tensor) -> Pending:
        """Sends bytes, which must stay as they are until the result has been waited for. Raises `LinkError`."""
        return self._begin("send", data)

    def receive(self, data: torch.Tensor) -> Pending:
        """Receives as many bytes as `data` has. Raises `LinkError`."""
        return self._begin("recv", data)

    def _begin(self, operation: Literal["send", "recv"], data: torch.Tensor) -> Pending:
        if self._group is None:
            raise LinkError("the link was closed")
        begin = self._group.send if operation == "send" else self._group.recv
        try:
            return begin([data], self._other, 0)
        except RuntimeError as error:
            raise LinkError(_first_line(error)) from error

    def close(self) -> None:
        """Ends the link. What is on its way is lost, and the other end hears of it."""
        # Gloo closes its connections when nobody refers to the group any more; `abort` and `shutdown` do nothing.
        self._group = None


def connect(address: LinkAddress) -> Link:
    """The sending end. Waits for the receiving process to accept it. Raises `LinkError`."""
    timeout = timedelta(seconds=address.timeout_s)
    try:
        own_ip = _ip_towards(address.ip)
        store = dist.TCPStore(address.ip, address.port, is_master=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise LinkError(
            f"{address.ip}:{address.port} does not answer within {address.timeout_s:g} s: {_first_line(error)}"
        ) from error
    return Link(store, address, own_ip, _SENDER)


def wait(pending: Pending, what: str) -> None:
    """Waits for a message. Raises `LinkError`, which says `what` was under way."""
    try:
        pending.wait()
    except RuntimeError as error:
        raise LinkError(f"{what}: {_first_line(error)}") from error


class Rendezvous:
    """A receiving process's store, at a port that the system chose, on all interfaces."""

    def __init__(self, timeout_s: float = LINK_TIMEOUT_S) -> None:
        """`timeout_s` is how long to wait for the other end of a link."""
        timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._store.port

    def accept(self, address: LinkAddress) -> Link:
        """The receiving end of a link. Waits for the sending end. Raises `LinkError`."""
        return Link(self._store, address, address.ip, _RECEIVER)


def resolve(host: str, port: int) -> str:
    """The IP address of a host. Raises `WeightsError` if its name is not known here."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise WeightsError(f"the generator host {host!r} is not known here: {error}") from error


def _ip_towards(ip: str) -> str:
    """This host's address on the way to another; the kernel's routes know it."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, 1))  # sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
