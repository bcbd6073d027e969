"""Generator hosts for tests of the network transport: in this process, or in processes that can be killed."""

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rl.system.hardware import host_identity
from rl.weights.network import NetworkReceiver
from rl.weights.receivers import RECEIVERS_KEY, Control, Received, ReceivingHost, Transfer
from rl.weights.receiving_process import ReceivingProcess
from rl.weights.versions import VersionRecord, WeightsError
from tests.stores import FakeStore
from tests.waiting import join
from trainer.engines.contract.plain_ranks import preloaded_forkserver


def host_entry(process: ReceivingProcess, identity: str | None = None) -> ReceivingHost:
    """The directory's entry for a receiving process that is this one."""
    identity = identity or host_identity()
    return entry(identity, process.port, process.link_timeout_s, process)


def entry(identity: str, port: int, link_timeout_s: float, control: Control) -> ReceivingHost:
    """An entry of the directory, reached over the loopback interface."""
    return ReceivingHost(
        name=identity,
        identity=identity,
        address="127.0.0.1",
        port=port,
        link_timeout_s=link_timeout_s,
        process=f"{identity}/{port}",
        control=control,
    )


def register(store: FakeStore, *hosts: ReceivingHost) -> None:
    """Writes the directory."""
    asyncio.run(store.put(RECEIVERS_KEY, hosts))


def read_at(identity: str, record: VersionRecord, patch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What a generator on this host reads of a version."""
    with patch.context() as here:
        for module in ("network", "shared_memory"):
            here.setattr(f"rl.weights.{module}.host_identity", lambda: identity)
        with NetworkReceiver().open(record, None) as buffer:
            return {spec.name: buffer.tensor(spec).clone() for spec in record.manifest}


class RemoteControl:
    """A `Control` that asks a process over a pipe."""

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self._ids = itertools.count()
        self._answers: dict[int, Any] = {}

    async def ping(self) -> None:
        await self._ask("ping")

    async def check_room(self, size_bytes: int, publisher: str) -> None:
        await self._ask("check_room", size_bytes, publisher)

    async def begin(self, transfer: Transfer) -> None:
        await self._ask("begin", transfer)

    async def finish(self, transfer_id: str, element_sums: tuple[int, ...] | None) -> Received:
        return await self._ask("finish", transfer_id, element_sums)

    async def give_up_next(self, transfer_id: str) -> None:
        await self._ask("give_up_next", transfer_id)

    async def abandon(self, transfer_id: str) -> None:
        await self._ask("abandon", transfer_id)

    async def drop(self, policy: str | None, publisher: str) -> None:
        await self._ask("drop", policy, publisher)

    async def _ask(self, method: str, *arguments: Any) -> Any:
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
        self.entry = entry(identity, pipe.recv(), link_timeout_s, RemoteControl(pipe))


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


def answer_calls(pipe: Any, receiving: ReceivingProcess) -> None:
    """Answers the calls of a `RemoteControl` until its end of the pipe is closed."""
    lock = threading.Lock()

    def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = asyncio.run(getattr(receiving, method)(*arguments))
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
