"""The transport between GPUs of different hosts: parts of the weights travel from device to device by NCCL.

    trainer rank's GPU --ncclSend--> GPU of a receiving process --copy--> the host's shared memory
                                     two rooms, in turns                  the same way to the next host

It is the transport `network` with other links. A link's TCP connection carries the heads of messages, and a
communicator of two ranks carries what they announce. Hosts keep versions and checksums as with `network`, and get a
second transfer where one breaks off. No CPU copies bytes, which bounds a link of `network` to a few GB/s. Changes alone
are not sent: to find them takes a copy of the last version and passes over both.

To make a communicator takes up to seconds. So both ends keep it from push to push, by a key that they agreed on. A
communicator is two ranks' own: when a process dies, only its links end. NCCL is called by NVIDIA's bindings, nccl4py,
which vLLM's CUDA build brings. torch's process groups would end the whole process when a communicator fails, which a
lost host must not do to a trainer.
"""

import asyncio
import itertools
import os
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, Self

import torch

from ownloop_hosts.weights.links import END, Link, LinkAddress, LinkError, Part
from ownloop_hosts.weights.network import Network, NetworkSender, outcomes_of
from ownloop_hosts.weights.receiving_process import ReceivingHost, ReceivingProcess
from rl.weights.store import VersionIndex, receivers_on_hosts
from rl.weights.version import Manifest, VersionRecord, WeightsError, on_rank_0, raise_on_every_rank

_KEY_BYTES = 16
_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_UINT8, _SUCCESS, _IN_PROGRESS = 1, 0, 7  # ncclUint8, ncclSuccess, ncclInProgress
_BINDINGS = "nccl.bindings.nccl"
_ROOM_BYTES = 8 << 20  # each link has two places of so many on the receiving GPU
_LOOK_S = 50e-6
_START_S = 60.0  # for a process to start CUDA
_KNOWN, _UNKNOWN = b"+", b"-"


class Pair(Protocol):
    """A communicator of two processes. One sends, and the other receives. Both methods may raise `LinkError`."""

    device: torch.device

    def send(self, data: torch.Tensor) -> None:
        """Sends bytes of the device (uint8 [N]), which may be overwritten when it returns."""
        ...

    def receive(self, into: torch.Tensor) -> None:
        """Waits until bytes have arrived on the device (uint8 [N]), where nothing else uses `into` meanwhile."""
        ...

    def interrupt(self) -> None:
        """Has a call that waits in another thread fail."""
        ...

    def end(self) -> None:
        """Frees the communicator. The other end's calls fail."""
        ...


class Maker(Protocol):
    """How a process makes its ends of pairs."""

    def why_not(self, device: int | None) -> str:
        """Why this process cannot; empty if it can. `device` is its only GPU; None stands for all, in turns."""
        ...

    def new_id(self) -> bytes:
        """What both ends need to find each other (128 bytes)."""
        ...

    def make(self, pair_id: bytes, rank: int, timeout_s: float) -> Pair:
        """An end; rank 0 is the one that called `new_id`. Raises `LinkError` if the other end does not come.

        The pair's calls take at most `timeout_s`.
        """
        ...


class NCCL:
    """Makes pairs of GPUs."""

    _devices: Iterator[int]

    def why_not(self, device: int | None) -> str:
        if not (torch.cuda.is_available() and torch.version.cuda is not None):
            return "this process computes without CUDA"
        try:
            import_module(_BINDINGS)
        except ImportError as error:
            return f"the package nccl4py is missing ({error})"
        torch.cuda.init()  # so that the host's memory is pinned, which is allocated next
        self._devices = itertools.cycle(range(torch.cuda.device_count()) if device is None else (device,))
        return ""

    def new_id(self) -> bytes:
        return bytes(memoryview(_call("get_unique_id")))

    def make(self, pair_id: bytes, rank: int, timeout_s: float) -> "NCCLPair":
        return NCCLPair(pair_id, rank, torch.device("cuda", next(self._devices)), timeout_s)


class NCCLPair:
    """Queues NCCL's kernels on a stream of its own, and looks whether they have ended, so that it can give up."""

    def __init__(self, pair_id: bytes, rank: int, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._peer = 1 - rank
        self._timeout_s = timeout_s
        self._is_interrupted = False
        self._stream = torch.cuda.Stream(device)
        made: Future[object] = Future()

        def make() -> None:
            try:
                with torch.cuda.device(device):
                    made.set_result(_call("comm_init_rank", 2, _unique_id(pair_id), rank))
            except Exception as error:
                made.set_exception(error)

        # NCCL waits for the other end without a limit, and nothing can end that.
        threading.Thread(target=make, daemon=True).start()
        try:
            self._communicator: Any = made.result(timeout_s)
        except TimeoutError:
            raise LinkError(f"no communicator of NCCL: the other end did not come within {timeout_s:g} s") from None

    def send(self, data: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.default_stream(self.device))  # in which `data` was computed
        self._run("send", data)

    def receive(self, into: torch.Tensor) -> None:
        self._run("recv", into)

    def interrupt(self) -> None:
        self._is_interrupted = True

    def end(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with suppress(LinkError):  # this end is gone, also if that fails
                _call("comm_abort", communicator)

    def _run(self, function: str, data: torch.Tensor) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            where = data.data_ptr(), data.nbytes, _UINT8, self._peer
            _call(function, *where, self._communicator, self._stream.cuda_stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        end = time.monotonic() + self._timeout_s
        while not done.query():
            time.sleep(_LOOK_S)
            self._look(f"{function} of {data.nbytes} bytes", end)
        if self._is_interrupted:
            raise LinkError("the link was broken off")

    def _look(self, what: str, end: float) -> None:
        """Raises `LinkError` if there is a reason not to wait any longer."""
        status = int(_call("comm_get_async_error", self._communicator))
        if status not in (_SUCCESS, _IN_PROGRESS):
            raise LinkError(f"{what}: {_call('get_error_string', status)}")
        if self._is_interrupted:
            raise LinkError(f"{what}: the link was broken off")
        if time.monotonic() >= end:
            raise LinkError(f"{what}: it took more than {self._timeout_s:g} s")


def _unique_id(pair_id: bytes) -> Any:
    return import_module(_BINDINGS).UniqueId.from_buffer(bytearray(pair_id))


def _call(function: str, *arguments: object) -> Any:
    """What a function of NCCL returns. Raises `LinkError` with its error."""
    bindings = import_module(_BINDINGS)
    try:
        return getattr(bindings, function)(*arguments)
    except bindings.NCCLError as error:
        raise LinkError(f"NCCL's {function}: {error}") from error


_Head = tuple[Part, int, bytes] | None
"""What `receive_head` returns."""


class NCCLLink(Link):
    """One end of a link. Heads go through its connection, and data through a pair."""

    part_bytes = _ROOM_BYTES
    carries_changes = False
    maker: ClassVar[Maker] = NCCL()
    idle: ClassVar[dict[str, dict[bytes, Pair]]] = defaultdict(dict)
    """The pairs of this process that no link uses, by the other end's address ("" if that is the sender) and by key."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        super().__init__(connection, timeout_s)
        self._place, self._key = "", b""
        self._pair: Pair | None = None
        self._is_whole = False  # whether everything has passed
        self._receiving: threading.Thread | None = None
        self._arrived = SimpleQueue[_Head | torch.Tensor | Exception]()
        self._free = SimpleQueue[torch.Tensor | None]()  # rooms that hold nothing; None ends the thread

    @classmethod
    def connect(cls, address: LinkAddress, transfer_id: str) -> Self:
        """The sending end, with a pair that both ends have or make."""
        link = super().connect(address, transfer_id)
        try:
            link._find_pair(f"{address.host}:{address.port}")
        except BaseException:
            link.close()
            raise
        return link

    @classmethod
    def expect(cls) -> None:
        """See `Link`."""
        if problem := _refusal("this host", cls.maker.why_not(None)):
            raise problem

    @classmethod
    def accept(cls, link: Link) -> "NCCLLink":
        """The receiving end."""
        own = cls(link.connection, link.timeout_s)
        own._key = own.receive_bytes(_KEY_BYTES)
        own._pair = cls.idle[""].pop(own._key, None)
        try:
            own.send(_UNKNOWN if own._pair is None else _KNOWN)
            if own._pair is None:
                own._pair = cls.maker.make(own.receive_bytes(_ID_BYTES), 1, link.timeout_s)
            for _ in range(2):
                own._free.put(own.room(_ROOM_BYTES, own._pair.device))
        except BaseException:
            own.close()
            raise
        own._receiving = threading.Thread(target=own._receive_ahead, args=(own._pair,), daemon=True)
        own._receiving.start()
        return own

    def _receive_ahead(self, pair: Pair) -> None:
        """Has one piece of a message arrive while another is copied from its room."""
        try:
            while (head := super().receive_head()) is not None:
                self._arrived.put(head)
                for begin in range(0, head[1], _ROOM_BYTES):
                    if (room := self._free.get()) is None:
                        return
                    pair.receive(room[: head[1] - begin])
                    self._arrived.put(room)
            self._arrived.put(None)
        except Exception as error:  # the thread that copies raises it
            self._arrived.put(error)

    def _next_arrived(self) -> "_Head | torch.Tensor":
        arrived = self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def _find_pair(self, place: str) -> None:
        try:
            key, pair = self.idle[place].popitem()
        except KeyError:
            key, pair = uuid.uuid4().bytes, None
        self._place, self._key, self._pair = place, key, pair
        self.send(key)
        if self.receive_bytes(1) == _UNKNOWN:
            if pair is not None:  # its other end is gone
                pair.end()
            pair_id = self.maker.new_id()
            self.send(pair_id)
            self._pair = self.maker.make(pair_id, 0, self.timeout_s)

    @staticmethod
    def room(num_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory of the tensors' own device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def send(self, data: bytes | memoryview) -> None:
        """See `Link`."""
        super().send(data)
        self._is_whole = data == END

    def send_data(self, data: torch.Tensor) -> None:
        """Sends from the pair's device."""
        assert self._pair is not None
        for piece in _rooms(data):
            self._pair.send(piece if piece.device == self._pair.device else piece.to(self._pair.device))

    def receive_data(self, into: torch.Tensor) -> None:
        """Copies from the pair's device."""
        for piece in _rooms(into):
            room = self._next_arrived()
            assert isinstance(room, torch.Tensor)
            piece.copy_(room[: len(piece)])
            self._free.put(room)

    def receive_head(self) -> "_Head":
        """See `Link`."""
        head = self._next_arrived()
        assert not isinstance(head, torch.Tensor)
        self._is_whole = head is None
        return head

    def interrupt(self) -> None:
        """See `Link`."""
        super().interrupt()
        if (pair := self._pair) is not None:
            pair.interrupt()

    def close(self) -> None:
        """Keeps the pair for the next link, unless this one broke."""
        if self._receiving is not None and not self._is_whole:
            self.interrupt()
            self._free.put(None)
            self._receiving.join()
        super().close()
        pair, self._pair = self._pair, None
        if pair is not None and self._is_whole:
            self.idle[self._place][self._key] = pair
        elif pair is not None:
            pair.end()

    @classmethod
    def end_idle(cls) -> None:
        """Frees the pairs that no link uses."""
        for of_place in cls.idle.values():
            while of_place:
                of_place.popitem()[1].end()


def _rooms(data: torch.Tensor) -> Sequence[torch.Tensor]:
    """Pieces of a message, at both ends the same; none if it is empty."""
    return data.split(_ROOM_BYTES) if len(data) else ()


class NCCLTransport(Network):
    """Only if it is asked for. A record's `location` is that of `Network`."""

    fallback_notice = "NCCL carries the weights"
    without_gpus = "network"

    def suits(self) -> bool:
        """`auto` takes `network`, which needs no GPUs on the hosts."""
        return False

    def sender(self, index: VersionIndex, *, reader_timeout_s: float, asked: bool) -> "NCCLSender":
        del asked
        return NCCLSender(index, reader_timeout_s)


class NCCLSender(NetworkSender):
    """Casts this rank's shards on its GPU and sends them to one of the first host's."""

    link = NCCLLink

    async def prepare(self, manifest: Manifest) -> None:
        """Also raises `WeightsError` if a rank or a host has no GPU."""
        own = NCCLLink.maker.why_not(int(os.environ.get("LOCAL_RANK", "0")))
        await asyncio.to_thread(raise_on_every_rank, _refusal("this trainer rank", own))
        await on_rank_0(self._check_hosts)
        await super().prepare(manifest)

    async def close(self, withdrawn: Iterable[VersionRecord]) -> None:
        """Also frees the communicators."""
        await super().close(withdrawn)
        NCCLLink.end_idle()
        await on_rank_0(partial(self._ask, _end_idle))

    async def _check_hosts(self) -> None:
        for host, why_not in await self._ask(_why_not):
            if problem := _refusal(f"generator host {host.name}", str(why_not)):
                raise problem

    async def _ask(self, of_process: Callable[[ReceivingProcess], object]) -> list[tuple[ReceivingHost, object]]:
        hosts = await receivers_on_hosts(await self._index.get_store())
        calls = [host.call(of_process) for host in hosts]
        return list(zip(hosts, await outcomes_of(hosts, calls, self._index.get_store, _START_S), strict=True))


def _refusal(who: str, why_not: str) -> WeightsError | None:
    why = f"weight_transport='nccl' is not possible: {who}: {why_not}; use 'network'"
    return WeightsError(why) if why_not else None


def _why_not(process: ReceivingProcess) -> str:
    """Why a receiving process cannot take part; empty if it can. What an earlier trainer left is freed."""
    _end_idle(process)
    return NCCLLink.maker.why_not(None)


def _end_idle(process: ReceivingProcess) -> None:
    del process
    NCCLLink.end_idle()
