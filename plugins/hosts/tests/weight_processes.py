"""What runs in the simulated hosts of `test_weights_between_hosts`: receiving processes, and a trainer's rank.

    python -m plugins.hosts.tests.weight_processes receive SOCKET LINK_TIMEOUT
    python -m plugins.hosts.tests.weight_processes push SOCKET LINK_TIMEOUT h2=10.77.0.2=SOCKET ...

Calls go over Unix sockets, which simulated hosts share as they share their files.
"""

import asyncio
import itertools
import socket
import sys
import threading
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch

from ownloop_hosts.weights.links import LinkAddress
from ownloop_hosts.weights.network import NetworkReceiver
from ownloop_hosts.weights.receiving_process import ReceivingHost, ReceivingProcess
from plugins.hosts.tests.weights.receiving_hosts import RemoteCall, answer_calls
from rl.system.hardware import host_identity
from rl.weights.store import RECEIVERS_KEY
from rl.weights.version import VersionRecord
from tests.stores import FakeStore
from tests.waiting import wait_until
from trainer.push import WeightPublisher


def shapes(megabytes: float) -> dict[str, tuple[int, ...]]:
    """Shapes of 272 tensors that take so much in bfloat16; one of them is a fifth of all."""
    columns = round(megabytes * 1e6 / 2 / (404 + 270 * 6))
    return {"embedding": (404, columns), "norm": (576,), **{f"layer_{index}": (6, columns) for index in range(270)}}


def weights(megabytes: float, version: int) -> dict[str, torch.Tensor]:
    """The tensors of a version: different numbers everywhere."""
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) % 251 + version + index
        for index, (name, shape) in enumerate(shapes(megabytes).items())
    }


def _memory(data: torch.Tensor) -> memoryview:
    array: Any = data.numpy()
    return memoryview(array)


class Host(ReceivingProcess):
    """A receiving process, and a generator's rank that reads what it holds."""

    def __init__(self, link_timeout_s: float) -> None:
        super().__init__(link_timeout_s)
        self._receiver = NetworkReceiver()
        self._weights: dict[str, torch.Tensor] = {}

    def describe(self) -> tuple[int, str]:
        """Its port and identity."""
        return self.port, host_identity()

    def pull(self, record: VersionRecord) -> float:
        """Copies a version into tensors of this process. Returns the seconds that it took."""
        begin = time.perf_counter()
        with self._receiver.open(record, None) as buffer:
            for spec in record.manifest:
                if spec.name not in self._weights:
                    self._weights[spec.name] = torch.zeros(spec.shape, dtype=spec.dtype)
                self._weights[spec.name].copy_(buffer.tensor(spec))
        return time.perf_counter() - begin

    def differing(self, megabytes: float, version: int) -> list[str]:
        """The tensors, as they were pulled last, that are not those of a version."""
        expected = weights(megabytes, version)
        return [name for name, tensor in expected.items() if not tensor.bfloat16().equal(self._weights[name])]

    def fetch(self, address: str, port: int, num_bytes: int) -> float:
        """Reads bytes over plain TCP. Returns the seconds that it took."""
        data, got = _memory(torch.ones(num_bytes, dtype=torch.uint8)), 0
        begin = time.perf_counter()
        with socket.create_connection((address, port)) as connection:
            while got < num_bytes:
                read = connection.recv_into(data[got:])
                assert read, "the connection ended"
                got += read
        return time.perf_counter() - begin


class Trainer:
    """A trainer's rank that pushes to hosts."""

    def __init__(self, link_timeout_s: float, hosts: list[str]) -> None:
        """`hosts` are "name=address=socket"."""
        self._entries: dict[str, ReceivingHost] = {}
        self._store = FakeStore()
        self._publisher = WeightPublisher(torch.bfloat16, "network", store=self._store)
        for host in hosts:
            name, address, path = host.split("=")
            port, identity = Process(path).call("describe")
            self._entries[name] = ReceivingHost(
                name=name,
                identity=identity,
                links=LinkAddress(address, port, link_timeout_s),
                process=f"{name}/{port}",
                call=RemoteCall(Client(path, "AF_UNIX")),
            )

    def push(self, megabytes: float, version: int, names: tuple[str, ...]) -> tuple[VersionRecord, float]:
        """Pushes a version to these hosts. Returns its record and the seconds that it took."""
        self._store.values[RECEIVERS_KEY] = tuple(self._entries[name] for name in names)
        tensors = weights(megabytes, version)
        begin = time.perf_counter()
        record = asyncio.run(self._publisher.publish(version, tensors.items()))
        assert record is not None
        return record, time.perf_counter() - begin

    def serve(self, num_bytes: int) -> int:
        """Sends bytes over plain TCP to the first who connects. Returns the port."""
        server, data = socket.create_server(("0.0.0.0", 0)), torch.ones(num_bytes, dtype=torch.uint8)

        def send() -> None:
            with server, server.accept()[0] as connection:
                connection.sendall(_memory(data))

        threading.Thread(target=send, daemon=True).start()
        return int(server.getsockname()[1])


class Process:
    """A process of a simulated host, as the test calls it."""

    def __init__(self, path: str | Path) -> None:
        """Waits until the process listens at `path`."""
        self._numbers = itertools.count()
        wait_until(lambda: self._connects(str(path)), f"a process that listens at {path}")

    def _connects(self, path: str) -> bool:
        try:
            self._pipe = Client(path, "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):  # the file is there before the process listens
            return False
        return True

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method returns. Raises what it raises."""
        self._pipe.send((next(self._numbers), method, arguments))
        result = self._pipe.recv()[1]
        if isinstance(result, Exception):
            raise result
        return result


def main() -> None:
    """Answers calls until it is ended."""
    torch.set_num_threads(1)
    kind, path, link_timeout_s, *hosts = sys.argv[1:]
    target: Any = Host(float(link_timeout_s)) if kind == "receive" else Trainer(float(link_timeout_s), hosts)
    with Listener(path, "AF_UNIX") as listener:
        while True:
            threading.Thread(target=answer_calls, args=(listener.accept(), target), daemon=True).start()


if __name__ == "__main__":
    main()
