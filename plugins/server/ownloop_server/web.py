"""HTTP for the servers of a controller: a socket, uvicorn without signal handlers, and a client that leaves."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from typing import TypeVar

import uvicorn
from fastapi import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

T = TypeVar("T")
PATIENCE_S = 30.0
"""How long a request may take to come whole; its body may take longer, at `SLOWEST_BYTES_PER_S`."""
SLOWEST_BYTES_PER_S = 10_000
MAX_JSON_VALUES = 2**20
"""Most commas and brackets in a body. To parse so many takes a tenth of a second, in which nothing else happens."""
MAX_HEAD_BYTES = 64 * 2**10
"""The size of a request's first line and headers."""


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises ValueError if it is taken or not of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it an answer takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # a server that was just stopped leaves the port in TIME_WAIT
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def has_too_many_values(body: bytes | bytearray) -> bool:
    """Whether a JSON body has more than `MAX_JSON_VALUES` values. Counting takes a thousandth of the parser's time."""
    return sum(body.count(mark) for mark in b",[{") > MAX_JSON_VALUES


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which by itself waits for ever for the headers of a request, of any size."""

    _waiting: asyncio.TimerHandle | None = None
    _num_read = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.cycle or self.cycle.response_complete:  # no request is being answered
            self._num_read += len(data)
            if self._num_read > MAX_HEAD_BYTES:
                self.transport.close()
            elif self._waiting is None:
                self._wait()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(PATIENCE_S, self.transport.close)

    def _stop_waiting(self) -> None:
        self._num_read = 0
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because `ownloop` has its own, and without websockets."""

    def __init__(self, config: uvicorn.Config) -> None:
        """Connections that do not say what they want are closed after `PATIENCE_S`."""
        config.http, config.ws = _Protocol, "none"
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield  # uvicorn would take Ctrl-C away from the whole program

    async def serve_until_cancelled(self, listener: socket.socket) -> None:
        """Serves; when cancelled, ends the requests that run."""
        running = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)  # a cancellation must not reach uvicorn in the middle of an answer
        finally:
            self.should_exit = self.force_exit = True
            await running


async def first_or_gone(answering: AsyncGenerator[T], request: Request) -> T | None:
    """The first thing that is yielded; None, and the generator ends, if the request's client disconnects before."""

    async def reply() -> T:
        return await anext(answering)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    replying, going = asyncio.create_task(reply()), asyncio.create_task(gone())
    try:
        await asyncio.wait((replying, going), return_when=asyncio.FIRST_COMPLETED)
        return replying.result() if replying.done() else None
    finally:
        for task in (replying, going):
            task.cancel()
        await asyncio.gather(replying, going, return_exceptions=True)
