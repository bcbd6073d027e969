"""Generator hosts for tests of the network transport: in this process, or in processes that can be killed."""

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from ownloop_hosts.weights.links import LinkAddress
from ownloop_hosts.weights.network import NetworkReceiver
from ownloop_hosts.weights.receiving_process import Call, ReceivingHost, ReceivingProcess
from rl.system.hardware import host_identity
from rl.weights.store import RECEIVERS_KEY
from rl.weights.version import VersionRecord, WeightsError
from tests.stores import FakeStore
from tests.waiting import join
from trainer.engines.contract.plain_ranks import preloaded_forkserver


def host_entry(process: ReceivingProcess, identity: str | None = None) -> ReceivingHost:
    """The directory's entry for a receiving process that is this one."""

    async def call(method: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(method, process, *arguments)

    return entry(identity or host_identity(), process.port, process.link_timeout_s, call)


def entry(identity: str, port: int, link_timeout_s: float, call: Call) -> ReceivingHost:
    """An entry of the directory, reached over the loopback interface."""
    links = LinkAddress("127.0.0.1", port, link_timeout_s)
    return ReceivingHost(name=identity, identity=identity, links=links, process=f"{identity}/{port}", call=call)


def register(store: FakeStore, *hosts: ReceivingHost) -> None:
    """Writes the directory."""
    asyncio.run(store.put(RECEIVERS_KEY, hosts))


def read_at(identity: str, record: VersionRecord, patch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What a generator on this host reads of a version."""
    with patch.context() as here:
        for module in ("ownloop_hosts.weights.network", "rl.weights.shared_memory"):
            here.setattr(f"{module}.host_identity", lambda: identity)
        with NetworkReceiver().open(record, None) as buffer:
            return {spec.name: buffer.tensor(spec).clone() for spec in record.manifest}


class RemoteCall:
    """A `Call` that asks a process over a pipe."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._ids = itertools.count()
        self._answers: dict[int, Any] = {}

    async def __call__(self, method: Callable[..., Any], *arguments: Any) -> Any:
        number = next(self._ids)
        try:
            self._pipe.send((number, method, arguments))
            while number not in self._answers:
                while self._pipe.poll():
                    answered, answer = self._pipe.recv()
                    self._answers[answered] = answer
                await asyncio.sleep(0.002)
        except (EOFError, OSError) as error:
            raise WeightsError("the receiving process is gone") from error
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer


class HostProcess:
    """A receiving process that is another process of this machine, under an identity of its own."""

    def __init__(self, identity: str, link_timeout_s: float) -> None:
        """Starts it, and waits until it listens."""
        preloaded_forkserver()
        context = multiprocessing.get_context("forkserver")
        pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, link_timeout_s), daemon=True)
        self.process.start()
        theirs.close()
        self.entry = entry(identity, pipe.recv(), link_timeout_s, RemoteCall(pipe))


@contextmanager
def host_processes(*identities: str, link_timeout_s: float = 5.0) -> Generator[list[HostProcess]]:
    """Receiving processes, one for each identity. They end with the block."""
    hosts = [HostProcess(identity, link_timeout_s) for identity in identities]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.process.kill()
            join(host.process)


def _serve(pipe: "Connection[Any, Any]", link_timeout_s: float) -> None:
    torch.set_num_threads(1)
    receiving = ReceivingProcess(link_timeout_s)
    pipe.send(receiving.port)
    answer_calls(pipe, receiving)


def answer_calls(pipe: Any, target: Any) -> None:
    """Answers calls of the target's methods, such as those of a `RemoteCall`, until the pipe's other end is closed."""
    lock = threading.Lock()

    def answer(number: int, method: Callable[..., Any] | str, arguments: tuple[Any, ...]) -> None:
        call = getattr(target, method) if isinstance(method, str) else partial(method, target)
        try:
            result = call(*arguments)
        except Exception as error:
            result = error
        with lock:
            pipe.send((number, result))

    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        threading.Thread(target=answer, args=asked, daemon=True).start()
