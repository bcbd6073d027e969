"""The controller's side of `hosts`, which runs in a simulated host of its own. Its last line is a JSON object.

python -m plugins.hosts.benchmarks.hosts_controller weights --hosts h1,h2,h3,h4 --megabytes 269 --rounds 3
python -m plugins.hosts.benchmarks.hosts_controller start --hosts h1,...,h16
python -m plugins.hosts.benchmarks.hosts_controller step --ranks 1,4,16,64
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they load Monarch, whose settings come first
    from controller.processes.mesh import Mesh
    from ownloop_hosts.cluster import Cluster
    from ownloop_hosts.remote_host import Host

ENV = {"OMP_NUM_THREADS": "1"}
_STEPS = 50
_STORE = "weights-of-hosts"


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("weights", "start", "step"))
    parser.add_argument("--hosts", default="")
    parser.add_argument("--megabytes", type=float, default=269.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", default="1,4,16,64")
    options = parser.parse_args()
    hosts = [name for name in options.hosts.split(",") if name]
    from ownloop_hosts.connections import SETTINGS, apply

    apply(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "weights":
            result = asyncio.run(weights(hosts, options.megabytes, options.rounds, Path(folder)))
        elif options.part == "start":
            result = asyncio.run(start(hosts, Path(folder)))
        else:
            result = asyncio.run(step([int(count) for count in options.ranks.split(",")], Path(folder)))
    print(json.dumps(result), flush=True)


async def _cluster(hosts: Sequence[str]) -> "Cluster":
    from ownloop_hosts.cluster import Cluster
    from ownloop_hosts.host_groups import WorkerHosts

    return await Cluster.connect(WorkerHosts({"trainer": tuple(f"tcp://{host}:26600" for host in hosts)}))


async def weights(names: Sequence[str], megabytes: float, rounds: int, logs: Path) -> dict[str, object]:
    """Pushes and pulls from the first host to the second, with its references, and to all of the others at once."""
    from controller.handles.store import WeightStore
    from ownloop_hosts.weights.receivers import GeneratorHost, WeightReceivers
    from plugins.hosts.benchmarks.host_actors import ReadingRank, SendingRank

    cluster = await _cluster(names)
    first, *others = cluster.hosts
    generator_hosts: list[GeneratorHost] = [cluster.receiving(others[0])]
    place = cluster.place("store", [first], 0)
    receivers = WeightReceivers(logs, lambda: generator_hosts, _STORE)
    store = await WeightStore.launch(logs, _STORE, hosts=place, receivers=receivers)
    trainer = await _spawn(cluster, "trainer", SendingRank, [first], logs, megabytes, store.name)
    readers = [
        await _spawn(cluster, f"reader-{host.name}", ReadingRank, [host], logs, megabytes, store.name)
        for host in others
    ]
    try:
        one = await _to_one(trainer, readers[0], first.facts.address, rounds)
        generator_hosts.extend(map(cluster.receiving, others[1:]))
        await store.complete()
        all_hosts = await _to_all(trainer, readers, rounds)
        size = (await trainer.call("num_bytes", [()]))[0]
        return {"megabytes": size / 1e6, "one": one, "all": all_hosts}
    finally:
        await asyncio.gather(trainer.stop(), *(reader.stop() for reader in readers), store.stop())
        await cluster.stop()


async def _spawn(
    cluster: "Cluster", name: str, actor: Any, hosts: "Sequence[Host]", logs: Path, *arguments: object
) -> "Mesh":
    from controller.processes.mesh import Mesh

    place = cluster.place(name, hosts, len(hosts))
    return await Mesh.spawn(name, actor, *arguments, num_ranks=len(hosts), env=ENV, log_dir=logs, hosts=place)


async def _to_one(trainer: "Mesh", reader: "Mesh", address: str, rounds: int) -> dict[str, list[float]]:
    """The seconds of each way to get a version from the trainer, at `address`, into a reader's tensors."""
    from ownloop_hosts.weights.links import LINKS

    seconds: dict[str, list[float]] = defaultdict(list)
    # The first round of everything is a warm-up, and the first of these versions is new to the host.
    for version in range(rounds + 1):
        push, _, sent = await _update(trainer, [reader], version, share=0.01)
        seconds["push_1_percent"].append(push)
        seconds["bytes_1_percent"].append(sent)
    for version in range(rounds + 1, 3 * rounds + 3, 2):
        for count, name in ((1, "tcp"), (LINKS, "tcp_side_by_side")):
            port = (await trainer.call("serve", [(count,)]))[0]
            seconds[name].append((await reader.call("fetch", [(address, port, count)]))[0])
        for index, (count, name) in enumerate(((1, "_1_link"), (LINKS, ""))):
            await trainer.call("use_links", [(count,)])
            push, pull, sent = await _update(trainer, [reader], version + index)
            for what, value in {"push": push, "pull": pull, "update": push + pull, "bytes": sent}.items():
                seconds[what + name].append(value)
        begin, key = time.perf_counter(), f"benchmark/{version}"
        await trainer.call("put", [(key,)])
        await reader.call("get", [(key,)])
        seconds["torchstore"].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


async def _to_all(trainer: "Mesh", readers: "Sequence[Mesh]", rounds: int) -> dict[str, list[float]]:
    updates = [await _update(trainer, readers, 1000 + version) for version in range(rounds + 1)][1:]
    return dict(zip(("push", "pull", "bytes"), map(list, zip(*updates, strict=True)), strict=True))


async def _update(
    trainer: "Mesh", readers: "Sequence[Mesh]", version: int, share: float = 1.0
) -> tuple[float, float, float]:
    """A push of weights of which a share has changed, and a pull on every host.

    Returns the seconds of both, and the bytes that the trainer's host has sent.

    Raises AssertionError if what arrived is not what was pushed.
    """
    await trainer.call("change", [(share,)])
    before = (await trainer.call("bytes_sent", [()]))[0]
    begin = time.perf_counter()
    record = (await trainer.call("publish", [(version,)]))[0]
    pushed = time.perf_counter()
    await asyncio.gather(*(reader.call("pull", [(record,)]) for reader in readers))
    pulled = time.perf_counter()
    sent = (await trainer.call("bytes_sent", [()]))[0] - before
    expected = (await trainer.call("sums", [()]))[0]
    for reader in readers:
        assert (await reader.call("sums", [()]))[0] == expected, reader.name
    return pushed - begin, pulled - pushed, float(sent)


async def start(names: Sequence[str], logs: Path) -> dict[str, object]:
    """Seconds from the first connection to the first answers of a mesh with a rank on every host."""
    from benchmarks.idle_rank import IdleRank

    begin = time.perf_counter()
    cluster = await _cluster(names)
    connected = time.perf_counter()
    mesh = await _spawn(cluster, "idle", IdleRank, cluster.hosts, logs)
    try:
        ids = await mesh.call("answer", [()] * len(names))
        assert len(set(ids)) == len(names)
        return {"connect": connected - begin, "answer": time.perf_counter() - begin}
    finally:
        await mesh.stop()
        await cluster.stop()


async def step(counts: Sequence[int], logs: Path) -> dict[str, object]:
    """Milliseconds of a call to every rank of a mesh on this host, by the number of ranks."""
    from benchmarks.idle_rank import IdleRank
    from controller.processes.mesh import Mesh

    medians: dict[str, object] = {}
    for count in counts:
        mesh = await Mesh.spawn(f"idle-{count}", IdleRank, num_ranks=count, env=ENV, log_dir=logs)
        try:
            took: list[float] = []
            for _ in range(_STEPS):
                begin = time.perf_counter()
                await mesh.call("answer", [()] * count)
                took.append(1e3 * (time.perf_counter() - begin))
            medians[str(count)] = statistics.median(took)
        finally:
            await mesh.stop()
    return medians


if __name__ == "__main__":
    main()
