"""What `ownloop doctor` finds out about hosts: what they are, whether they reach each other, and what would fail."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.processes.errors import HostLostError
from ownloop_hosts.cluster import connect_host, different_versions, prepare_transport
from ownloop_hosts.connections import Address, open_server, own_address_towards, read_from
from ownloop_hosts.host_groups import Groups, HostGroups, lease_of
from ownloop_hosts.remote_host import Host, HostError

CONTROLLER = "controller"
_CLOCK_S = 1.0  # more puts the lines of logs and timelines in a wrong order
_READ_S = 5.0


@dataclass(slots=True)
class Examination:
    """What was found."""

    hosts: list[Host] = field(default_factory=list[Host])
    """Those whose agents could be started."""
    clocks: dict[str, float] = field(default_factory=dict[str, float])
    """By host, how many seconds its clock is ahead of the controller's."""
    bytes_per_s: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    """(Sender, receiver) -> bytes a second between them."""
    problems: list[str] = field(default_factory=list[str])
    """What would fail."""


async def examine(hosts: HostGroups, num_bytes: int) -> Examination:
    """Starts an agent on every host, asks, and ends them. Pairs of hosts send each other `num_bytes` bytes.

    Raises ValueError if this process itself cannot take part: it has no certificate, or a host's name no address; and
    if hosts cannot be had: see `Allocation.workers`.
    """
    lease = lease_of(hosts)
    try:
        return await _examine(hosts, await lease.allocation.workers(), num_bytes)
    finally:
        await lease.end()


async def _examine(hosts: HostGroups, groups: Groups, num_bytes: int) -> Examination:
    addresses = tuple(dict.fromkeys(address for group in groups.values() for address in group))
    prepare_transport(addresses, hosts.certs)
    found, controller = Examination(), uuid.uuid4().hex
    connections = await asyncio.gather(
        *(connect_host(address, controller, hosts.lost_after_s) for address in addresses), return_exceptions=True
    )
    for connection in connections:
        if isinstance(connection, Host):
            found.hosts.append(connection)
        elif isinstance(connection, HostError):
            found.problems.append(str(connection))
        else:
            raise connection
    try:
        found.problems += different_versions(found.hosts)
        await _look_at_clocks(found)
        await _look_at_pairs(found, addresses[0], num_bytes)
        _look_at_gpus(found, groups)
    finally:
        await asyncio.gather(*(host.stop() for host in found.hosts))
    return found


async def _look_at_clocks(found: Examination) -> None:
    for host in found.hosts:
        before = time.time()
        there = await host.ask(time.time)
        found.clocks[host.name] = there - (before + time.time()) / 2
        if abs(found.clocks[host.name]) > _CLOCK_S:
            found.problems.append(
                f"{host.name}: its clock is {found.clocks[host.name]:+.1f} s off; let it take its time from a server"
            )


async def _look_at_pairs(found: Examination, first: Address, num_bytes: int) -> None:
    """Every pair of hosts, one after the other, the controller among them."""
    here = own_address_towards(first.host)
    ends: list[Host | None] = [None, *found.hosts]
    for sender in ends:
        for receiver in ends:
            if sender is receiver:
                continue
            names = (sender.name if sender else CONTROLLER, receiver.name if receiver else CONTROLLER)
            address = sender.facts.address if sender else here
            try:
                port = await (sender.ask(open_server, address, num_bytes) if sender else
                              asyncio.to_thread(open_server, address, num_bytes))  # fmt: skip
                reading = (address, port, _READ_S)
                found.bytes_per_s[names] = await (
                    receiver.ask(read_from, *reading) if receiver else asyncio.to_thread(read_from, *reading)
                )
            except (OSError, HostLostError) as error:
                found.problems.append(
                    f"{names[1]} cannot connect to {names[0]} at {address} on a free port: {error}; let hosts reach "
                    "each other on all ports above 1024"
                )


def _look_at_gpus(found: Examination, groups: Mapping[str, Sequence[Address]]) -> None:
    """Ranks of one mesh compute the same only on equal GPUs, and as many of them."""
    for role, group in groups.items():
        names = {address.host for address in group}
        kinds = {(len(host.facts.gpus), host.facts.gpu_kind) for host in found.hosts if host.name in names}
        if len(kinds) > 1:
            each = ", ".join(f"{count} x {kind or 'no GPU'}" for count, kind in sorted(kinds))
            found.problems.append(f"the hosts of {role!r} differ: {each}")
