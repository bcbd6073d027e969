"""Hosts without machines: agents that answer, fall silent or have ended, in the test's own process."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ownloop_hosts.connections import Address
from ownloop_hosts.host_agent import Beat, HostFacts, RankStates
from ownloop_hosts.remote_host import Host


class Endpoint:
    """An endpoint of a Monarch actor, as its callers see it."""

    def __init__(self, agent: "FakeAgent", name: str) -> None:
        self._agent, self._name = agent, name

    async def call_one(self, *args: Any) -> Any:
        """The agent's answer."""
        self._agent.calls.append((self._name, *args))
        await self._agent.answers.wait()
        if self._agent.error is not None:
            raise self._agent.error
        return getattr(self._agent, f"on_{self._name}")(*args)

    def broadcast(self, *args: Any) -> None:
        """Sends and does not wait."""
        self._agent.calls.append((self._name, *args))


class FakeAgent:
    """Answers while `answers` is set, and raises `error` if there is one."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: BaseException | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.states: Mapping[str, RankStates] = {}
        self.logs: dict[Path, bytes] = {}

    def __getattr__(self, name: str) -> Endpoint:
        return Endpoint(self, name)

    def on_beat(self, offsets: Mapping[Path, int]) -> Beat:
        """What was logged after the offsets."""
        return Beat(self.states, {log: self.logs[log][offset:] for log, offset in offsets.items() if log in self.logs})

    def on_stacks(self, mesh: str, ranks: Sequence[int]) -> Mapping[int, str]:
        """One line each."""
        return {rank: f"rank {rank} of {mesh}" for rank in ranks}


class _Stoppable:
    async def stop(self) -> None:
        """Never answers, as a lost host."""
        await asyncio.Event().wait()


def fake_host(name: str, *, gpus: Sequence[str] = (), worker: Address | None = None, lost_after_s: float = 20) -> Host:
    """A host whose agent is a `FakeAgent`. It is not watched."""
    worker = worker or Address("tcp", name, 26600)
    host = Host(worker, _Stoppable(), _Stoppable(), FakeAgent(), lost_after_s)
    host.facts = HostFacts(
        identity=name,
        python="python",
        versions={"torch": "2"},
        gpus=tuple(gpus),
        gpu_kind="H100" if gpus else "",
        address="10.0.0.1",
        network={"GLOO_SOCKET_IFNAME": "eth1"},
        log_folder=Path("/tmp/logs"),
        clock=0.0,
        memory_bytes=1 << 34,
    )
    return host


def listener() -> tuple[socket.socket, Address]:
    """What stands for a worker's port."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, Address("tcp", "127.0.0.1", server.getsockname()[1])
