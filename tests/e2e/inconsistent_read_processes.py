"""The processes of `test_inconsistent_reads`: the real publisher and the real buffers, without Monarch and vLLM.

Every element of version v of tensor i is `value(v, i)`, so a mixture of two versions shows wherever it is.
"""

import asyncio
import json
import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from rl.weights.memory import BufferLocation, WeightBuffer
from rl.weights.store import living_versions
from rl.weights.version import UnknownVersionError, WeightsError
from trainer.push import WeightPublisher

NUM_TENSORS = 6
HALF = (64, 300)
"""Of a tensor, which each of two trainer ranks holds."""


def value(version: int, index: int) -> float:
    return float((7 * version + index) % 251)  # exact in bfloat16


class StoreClient:
    """`rl.weights.store.Store` over a socket to `serve_store`."""

    def __init__(self, address: str) -> None:
        for _ in range(6000):  # half a minute, in which a pause of the host does not count
            try:
                self._connection: Connection[Any, Any] = Client(address)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.005)
        raise WeightsError("the store is gone")  # it was killed before it listened

    async def put(self, key: str, value: Any) -> None:
        self._ask("put", key, value)

    async def get(self, key: str) -> Any:
        found, value = self._ask("get", key, None)
        if not found:
            raise KeyError(f"Unable to locate {key}")
        return value

    async def delete(self, key: str) -> None:
        self._ask("delete", key, None)

    def _ask(self, *request: Any) -> Any:
        try:
            self._connection.send(request)
            return self._connection.recv()
        except (EOFError, OSError):
            raise WeightsError("the store is gone") from None


def serve_store(address: str) -> None:
    values: dict[str, Any] = {}

    def serve(connection: "Connection[Any, Any]") -> None:
        while True:
            try:
                verb, key, value = connection.recv()
            except (EOFError, OSError):
                return
            if verb == "put":
                values[key] = value
            if verb == "delete":
                values.pop(key, None)
            connection.send((key in values, values.get(key)))

    with Listener(address) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()


def publish(rank: int, folder: str) -> None:
    """A trainer rank with half of every tensor; publishes version after version until something ends it."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),  # of a rank that is killed before the others know it
        store=dist.FileStore(f"{folder}/ranks", 2),  # pyright: ignore[reportArgumentType]
    )
    mesh = init_device_mesh("cpu", (2,))
    publisher = WeightPublisher(torch.bfloat16, "shared_memory", store=StoreClient(f"{folder}/store"))
    version = 0
    try:
        while True:
            _report(folder, f"trainer{rank}", published=version, error=None)
            version += 1
            tensors = {
                f"t{i}": DTensor.from_local(torch.full(HALF, value(version, i)), mesh, [Shard(0)], run_check=False)
                for i in range(NUM_TENSORS)
            }
            asyncio.run(publisher.publish(version, tensors.items()))
    except (WeightsError, RuntimeError) as error:  # gloo's own, of a dead peer, is a RuntimeError
        _report(folder, f"trainer{rank}", published=version - 1, error=type(error).__name__)


def read(folder: str, seed: int) -> None:
    """A generator rank: reads the newest version or the one before it until the store is gone."""
    torch.set_num_threads(1)
    choose = torch.Generator().manual_seed(seed)
    counts = {"whole": 0, "refused": 0, "inconsistent": 0}
    buffers: dict[BufferLocation, WeightBuffer] = {}
    store = StoreClient(f"{folder}/store")

    async def read_one() -> None:
        records = await living_versions(store)
        if not records:
            await asyncio.sleep(0.002)
            return
        record = records[int(torch.randint(len(records), (), generator=choose))]
        if record.location not in buffers:
            buffers[record.location] = WeightBuffer.open(record.location)
        buffer = buffers[record.location]
        with buffer.reading(record):
            buffer.check_checksums(record)
            tensors = [buffer.tensor(spec).clone() for spec in record.manifest]
        for spec, tensor in zip(record.manifest, tensors, strict=True):
            if not (tensor == value(record.version, int(spec.name[1:]))).all():
                counts["inconsistent"] += 1
        counts["whole"] += 1

    while True:
        try:
            asyncio.run(read_one())
        except UnknownVersionError:
            counts["refused"] += 1
        except WeightsError as error:
            counts["refused"] += 1
            if "store is gone" in str(error):
                _report(folder, "generator", **counts, error="WeightsError")
                return
        _report(folder, "generator", **counts, error=None)


def _report(folder: str, name: str, **what: Any) -> None:
    """Written whole or not at all, because the writer may be killed."""
    path = Path(folder) / f"{name}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(what))
    partial.replace(path)
