"""How long a replica is tried again whose host is lost."""

import pytest

from controller.processes.errors import HostLostError, HostsOverError, MeshError
from tests.controller.handles.fake_replicas import SAMPLING, routed, send, settle
from tests.waiting import until


@pytest.mark.parametrize("kind", [HostsOverError, HostLostError])
async def test_a_replica_whose_hosts_are_gone_is_not_tried_again(kind: type[HostLostError]) -> None:
    async with routed(num_replicas=1) as (router, replicas):
        replicas.start_error, replicas.num_start_errors = kind("hosts", "job 1 is TIMEOUT"), 1
        replicas[0].kill()
        with pytest.raises(MeshError, match=r"no replica is left: hosts: job 1 is TIMEOUT"):
            await router.generate((1,), SAMPLING)


async def test_a_replica_waits_for_its_host_while_another_serves() -> None:
    async with routed() as (router, replicas):
        replicas.start_error, replicas.num_start_errors = HostLostError("generator", "host n2 is lost"), 1
        request = send(router, 1)
        await settle()
        replicas[0].kill()
        await until(lambda: len(replicas) == 3, "a successor")
        replicas[1].release()
        assert len(await request) == 1
