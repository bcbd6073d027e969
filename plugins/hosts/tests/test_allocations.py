"""A run keeps its hosts over restarts, and gives them back when it ends; without a run they end with their lease."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.launching.hosts import Tell
from ownloop_hosts.cluster import Cluster
from ownloop_hosts.connections import Address
from ownloop_hosts.host_groups import Allocation, Groups, kept_allocations, lease_of
from ownloop_hosts.remote_host import Host
from plugins.hosts.tests.fake_hosts import fake_host
from tests.waiting import run_virtual

GROUPS = {"trainer": (Address("tcp", "127.0.0.1", 9),)}


@dataclass
class CountedHosts:
    """Hosts that say what is done with them."""

    events: list[str] = field(default_factory=list[str], compare=False)
    certs: Path | None = None
    uses_tls: bool = False
    lost_after_s: float = 20.0

    def allocation(self, tell: Tell) -> Allocation:
        """A new one."""
        tell("waiting")
        self.events.append("allocation")
        return _Counted(self.events)


@dataclass
class _Counted:
    events: list[str]

    async def workers(self) -> Groups:
        self.events.append("workers")
        return GROUPS

    async def revived(self) -> Groups:
        self.events.append("revived")
        return {"trainer": (Address("tcp", "n1", 10),)}

    async def stop(self) -> None:
        self.events.append("stop")


async def _leases(hosts: CountedHosts) -> None:
    for _ in range(2):
        lease = lease_of(hosts)
        assert await lease.allocation.workers() == GROUPS
        await lease.end()


def test_an_allocation_ends_with_its_lease(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = CountedHosts()
    asyncio.run(_leases(hosts))
    assert hosts.events == ["allocation", "workers", "stop"] * 2
    assert capsys.readouterr().out == "waiting\n" * 2


def test_a_run_keeps_its_allocation_until_it_ends() -> None:
    hosts, told = CountedHosts(), list[str]()

    async def run() -> None:
        async with kept_allocations(told.append):
            await asyncio.create_task(_leases(hosts))
            assert hosts.events == ["allocation", "workers", "workers"]
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert hosts.events == ["allocation", "workers", "workers", "stop"]
    assert told == ["waiting"]


def test_a_lost_host_is_found_where_its_allocation_has_it_now(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, connected = CountedHosts(), list[Address]()

    async def connect(address: Address, controller: str, lost_after_s: float) -> Host:
        connected.append(address)
        return fake_host(address.host, worker=address)

    monkeypatch.setattr("ownloop_hosts.cluster.connect_host", connect)

    async def run() -> None:
        old = fake_host("n1", worker=Address("tcp", "n1", 9))
        cluster = Cluster({"trainer": (old,)}, {old: old.worker}, "c", 20.0, lease_of(hosts))
        await cluster.revive("trainer")
        assert not connected
        old.lose("it was cut")
        await asyncio.gather(cluster.revive("trainer"), cluster.revive("trainer"))  # for two replicas of a generator
        assert [host.worker.port for host in cluster.groups["trainer"]] == [10]

    run_virtual(run())
    assert connected == [Address("tcp", "n1", 10)]
    assert hosts.events == ["allocation", "revived"]


def test_hosts_that_cannot_be_used_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = CountedHosts()
    monkeypatch.setattr("ownloop_hosts.cluster.prepare_transport", lambda *_: None)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):  # nothing listens there
        asyncio.run(Cluster.connect(hosts))
    assert hosts.events == ["allocation", "workers", "stop"]
