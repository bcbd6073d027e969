"""Controllers that run in a host of the tests: `python -m plugins.hosts.tests.controllers NAME LOGS ROLE=HOST,... ...`.

Each prints what happened, one word and then values, and ends in order. Toys stand for trainers and generators.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ownloop_hosts.connections import SETTINGS, apply
from ownloop_hosts.host_groups import parse_groups

apply(SETTINGS)

from controller.processes.errors import MeshError  # noqa: E402
from controller.processes.mesh import Mesh  # noqa: E402
from ownloop_hosts.cluster import Cluster  # noqa: E402
from tests.e2e.toy_actor import Toy  # noqa: E402
from tests.waiting import until  # noqa: E402

LOST_AFTER_S = 10.0
"""In `lose`. Where no host may be lost it is longer."""
_LONG_S = 60.0


@asynccontextmanager
async def connected(groups: list[str], lost_after_s: float = _LONG_S) -> AsyncGenerator[Cluster]:
    """A cluster that takes hosts for lost after that time without a sign of life."""
    cluster = await Cluster.connect(replace(parse_groups(groups), lost_after_s=lost_after_s))
    try:
        yield cluster
    finally:
        await cluster.stop()


async def toys(cluster: Cluster, group: str, num_ranks: int, logs: Path) -> Mesh:
    """A mesh of toys on a group of hosts."""
    place, env = cluster.place(group, cluster.groups[group], num_ranks), {"TOY_GREETING": "hello"}
    return await Mesh.spawn(group, Toy, 5, num_ranks=num_ranks, env=env, log_dir=logs, hosts=place)


async def hangs(log: Path) -> None:
    """Waits until a toy has said in its log that it hangs."""
    await until(lambda: log.is_file() and "hangs for" in log.read_text(), f"a hanging toy in {log.name}")


def say(*words: object) -> None:
    """One line."""
    print(*words, flush=True)


async def reduce(logs: Path, groups: list[str]) -> None:
    """Two ranks on each of two hosts answer, and find each other in a collective. One dies."""
    async with connected(groups) as cluster:
        mesh = await toys(cluster, "trainer", 4, logs)
        say("added", *await mesh.call("add", [(rank,) for rank in range(4)]))
        say("reduced", *await mesh.call("reduce", [((), False)] * 4))
        try:
            await mesh.call("die", [None, None, None, ()])
        except MeshError as error:
            say("error", error.rank, str(error).splitlines()[0])
        await mesh.stop()
    say("stopped")


async def lose(logs: Path, groups: list[str]) -> None:
    """A call to each of three hosts is in flight while they are lost. Afterwards the hosts are connected to again."""
    async with connected(groups, LOST_AFTER_S) as cluster:
        meshes = await asyncio.gather(*(toys(cluster, group, 1, logs) for group in cluster.groups))
        calls = [mesh.call("hang", [(600,)]) for mesh in meshes]
        waiting = [asyncio.create_task(call) for call in calls]
        for group in cluster.groups:
            await hangs(logs / f"{group}-0.log")
        say("hanging")

        async def ended(group: str, call: asyncio.Task[list[Any]]) -> None:
            try:
                await call
            except MeshError as error:
                say("error", group, type(error).__name__, str(error).splitlines()[0])

        await asyncio.gather(*(ended(group, call) for group, call in zip(cluster.groups, waiting, strict=True)))
        await asyncio.gather(*(mesh.stop() for mesh in meshes))
    say("stopped")
    while True:
        await asyncio.sleep(0.5)
        try:
            async with connected(groups) as cluster:
                if all(len(hosts) == 1 for hosts in cluster.groups.values()):
                    again = await asyncio.gather(*(toys(cluster, group, 1, logs) for group in cluster.groups))
                    say("again", *[(await mesh.call("add", [(1,)]))[0] for mesh in again])
                    await asyncio.gather(*(mesh.stop() for mesh in again))
                    return
        except ValueError as error:  # not all of them are back
            say("waiting", error)


async def blip(logs: Path, groups: list[str]) -> None:
    """A call is in flight while its host is out of reach for a moment; then the next one hangs for ever."""
    async with connected(groups) as cluster:
        mesh = await toys(cluster, "trainer", 1, logs)
        call = asyncio.create_task(mesh.call("hang", [(5,)]))
        await hangs(logs / "trainer-0.log")
        say("hanging")
        await call
        say("survived", (await mesh.call("add", [(1,)]))[0])
        await mesh.call("hang", [(600,)])


async def copy(model: Path, groups: list[str]) -> None:
    """Hosts get a model that they lack, which only this host has."""
    async with connected(groups) as cluster:
        hosts = cluster.groups["trainer"]
        place = cluster.place("trainer", hosts, len(hosts))
        started = time.monotonic()
        await asyncio.gather(*(place.check_model_directory(model) for _ in range(2)))
        say("copied", f"{time.monotonic() - started:.2f}")


if __name__ == "__main__":
    what, folder, *hosts = sys.argv[1:]
    asyncio.run({"reduce": reduce, "lose": lose, "blip": blip, "copy": copy}[what](Path(folder), hosts))
    say("end")
