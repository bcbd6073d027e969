"""HTTP for the servers of a controller: a socket, uvicorn without signal handlers, and a client that leaves."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from typing import TypeVar

import uvicorn
from fastapi import Request

T = TypeVar("T")


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


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because `ownloop` has its own."""

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
