"""The processes that `hosts` measures, in a module that Monarch's processes can import."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, endpoint

from ownloop_hosts.weights import links
from ownloop_hosts.weights.network import NetworkReceiver
from rl.weights.shared_memory import Workers
from rl.weights.version import VersionRecord
from trainer.push import WeightPublisher

NUM_TENSORS = 272
"""As many as SmolLM2-135M has."""


def shapes(megabytes: float) -> dict[str, tuple[int, int]]:
    """Shapes of weights that take so much in bfloat16; like a small model's, one of them is a fifth of all."""
    elements = int(megabytes * 1e6 / 2)
    rows = max(1, elements * 4 // 5 // (NUM_TENSORS - 1) // 64)
    others = {f"layer_{index}": (rows, 64) for index in range(NUM_TENSORS - 1)}
    return {"embedding": (max(1, elements // 5 // 64), 64), **others}


def _memory(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


class SendingRank(Actor):
    """A trainer's rank with float32 master weights."""

    def __init__(self, megabytes: float, store_name: str) -> None:
        """`megabytes` is the size of a version."""
        self._store_name = store_name
        self._masters = {name: torch.randn(shape) for name, shape in shapes(megabytes).items()}
        self._publisher = WeightPublisher(torch.bfloat16, "network", store_name=store_name)
        self._flat = torch.cat([t.to(torch.bfloat16).view(-1) for t in self._masters.values()]).view(torch.uint8)

    @endpoint
    async def num_bytes(self) -> int:
        """Size of a version."""
        return self._flat.nbytes

    @endpoint
    async def change(self, share: float) -> None:
        """Changes this share of the elements of every tensor, evenly spread."""
        for tensor in self._masters.values():
            tensor.view(-1)[:: round(1 / share)].neg_()

    @endpoint
    async def use_links(self, count: int) -> None:
        """Pushes over so many links from now on."""
        links.LINKS = count

    @endpoint
    async def publish(self, version: int) -> VersionRecord:
        """Publishes the weights."""
        record = await self._publisher.publish(version, self._masters.items())
        assert record is not None
        return record

    @endpoint
    async def serve(self, num_connections: int) -> int:
        """Sends a version's bytes over plain TCP, an even share to each who connects. Returns the port."""
        server = socket.create_server(("0.0.0.0", 0))

        def send(share: torch.Tensor) -> None:
            with server.accept()[0] as connection:
                connection.sendall(_memory(share))

        for share in self._flat.chunk(num_connections):
            threading.Thread(target=send, args=(share,), daemon=True).start()
        return int(server.getsockname()[1])

    @endpoint
    async def bytes_sent(self) -> int:
        """What this host has sent so far over all of its interfaces, with headers; not what it sent to itself."""
        lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
        counters = dict(line.split(":") for line in lines)
        return sum(int(each.split()[8]) for name, each in counters.items() if name.strip() != "lo")

    @endpoint
    async def put(self, key: str) -> None:
        """Casts the weights and puts them into TorchStore as a state dict."""
        import torchstore

        weights = {name: t.to(torch.bfloat16) for name, t in self._masters.items()}
        await torchstore.put_state_dict(weights, key, store_name=self._store_name)

    @endpoint
    async def sums(self) -> dict[str, float]:
        """The sum of every tensor as it is published, to check what arrived."""
        return {name: float(t.to(torch.bfloat16).double().sum()) for name, t in self._masters.items()}


class ReadingRank(Actor):
    """A generator's rank: tensors in the memory of its process, as vLLM has them, that are overwritten by a pull."""

    def __init__(self, megabytes: float, store_name: str) -> None:
        """`megabytes` is the size of a version."""
        self._store_name = store_name
        self._weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes(megabytes).items()}
        self._flat = torch.zeros(sum(t.nbytes for t in self._weights.values()), dtype=torch.uint8)
        self._receiver = NetworkReceiver()
        torch.set_num_threads(links.LINKS)  # a generator copies with all cores of its host
        self._workers = Workers()

    @endpoint
    async def pull(self, record: VersionRecord) -> None:
        """Copies a version out of this host's shared memory."""
        with self._receiver.open(record, None) as buffer:
            self._workers.copy((self._weights[spec.name], buffer.tensor(spec)) for spec in record.manifest)

    @endpoint
    async def fetch(self, host: str, port: int, num_connections: int) -> float:
        """Reads a version's bytes over plain TCP connections side by side. Returns the seconds that it took."""

        def receive(share: torch.Tensor) -> int:
            data, got = _memory(share), 0
            with socket.create_connection((host, port)) as connection:
                while read := connection.recv_into(data[got:]):
                    got += read
            return got

        begin = time.perf_counter()
        with ThreadPoolExecutor(num_connections) as threads:
            received = sum(threads.map(receive, self._flat.chunk(num_connections)))
        assert received == self._flat.nbytes, "a connection ended early"
        return time.perf_counter() - begin

    @endpoint
    async def get(self, key: str) -> None:
        """Gets a state dict from TorchStore and copies it into this rank's tensors."""
        import torchstore

        fetched = await torchstore.get_state_dict(key, store_name=self._store_name)
        for name, tensor in self._weights.items():
            tensor.copy_(fetched[name])

    @endpoint
    async def sums(self) -> dict[str, float]:
        """The sum of every tensor."""
        return {name: float(tensor.double().sum()) for name, tensor in self._weights.items()}
