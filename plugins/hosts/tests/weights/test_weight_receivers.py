"""Receiving processes of generator hosts that are lost. Each runs in the test's own process."""

import asyncio
from pathlib import Path

import pytest

from ownloop_hosts.weights.receivers import GeneratorHost, WeightReceivers
from rl.weights.store import receivers_on_hosts
from tests.meshes_in_process import InProcessMesh, meshes_in_process


def test_a_push_needs_lost_processes_only_if_no_host_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessMesh, "pids", (1,))  # for the name of the process
    lost = set[str]()

    def host(name: str) -> GeneratorHost:
        return GeneratorHost(
            name=name, identity=name, address="127.0.0.1", place=lambda: None, is_lost=lambda: name in lost
        )

    async def main() -> None:
        import torchstore

        hosts = [host("n1"), host("n2")]
        receivers = WeightReceivers(tmp_path, lambda: hosts, "weights")
        assert list(receivers.lost) == []  # there are none yet
        await receivers.complete()
        lost.add("n1")
        await receivers.complete()
        assert [each.name for each in await receivers_on_hosts(await torchstore.client("weights"))] == ["n2"]
        assert list(receivers.lost) == []
        lost.add("n2")
        await receivers.complete()
        assert [mesh.name for mesh in receivers.lost] == ["weights-n2"]
        lost.remove("n1")  # it came back
        await receivers.complete()
        assert [each.name for each in await receivers_on_hosts(await torchstore.client("weights"))] == ["n1"]
        assert list(receivers.lost) == []
        await receivers.stop()

    with meshes_in_process():
        asyncio.run(main())
