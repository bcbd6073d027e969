"""A gateway behind a real HTTP server, in a thread of the test's own process."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the package tinker, of the extra tinker, is not installed")

import tinker
import uvicorn

from ownloop_server.app import make_app
from ownloop_server.config import Limits
from ownloop_server.gateway import Gateway
from ownloop_server.keys import Keys
from ownloop_server.serving import KEEP_ALIVE_S
from ownloop_server.web import Server, listen
from plugins.server.tests.toy_model import ToyHost
from plugins.server.tests.toy_whole_models import with_whole_models
from tests.waiting import LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """What a test sees of it."""

    url: str
    host: ToyHost
    gateway: Gateway
    keys: Keys
    folder: Path
    http: uvicorn.Server

    def client(self, key: str = "tml-local") -> tinker.ServiceClient:
        """A new client of the official SDK."""
        return tinker.ServiceClient(base_url=self.url, api_key=key)


@contextmanager
def running_server(
    folder: Path,
    *,
    max_snapshots: int = 8,
    num_whole: int = 0,
    poll_s: float = 25.0,
    needs_key: bool = False,
    limits: Limits | None = None,
    tls: tuple[Path, Path] | tuple[None, None] = (None, None),
    **served: Any,
) -> Generator[RunningServer]:
    """Starts a server of the toy model, and ends it with the block. `served` are fields of `ServedModel`."""
    listener = listen("127.0.0.1", 0)
    listener.listen()  # requests may come before the server accepts them
    started: list[RunningServer] = []
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        host = ToyHost()
        model = with_whole_models(host.served(folder / "recovery", max_snapshots), host, num_whole)
        gateway = Gateway([replace(model, **served)], folder)
        keys = Keys(folder)
        app = make_app(gateway, keys, limits or Limits(), needs_key=needs_key, poll_s=poll_s)
        options = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, ssl_certfile=tls[0], ssl_keyfile=tls[1]
        )
        server = Server(options)
        servers.append(server)
        url = f"{'http' if tls[0] is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
        started.append(RunningServer(url=url, host=host, gateway=gateway, keys=keys, folder=folder, http=server))
        ready.set()
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(LIMIT_S), "the server has not started"
    try:
        yield started[0]
    finally:
        servers[0].should_exit = servers[0].force_exit = True
        thread.join(LIMIT_S)
        listener.close()
        assert not thread.is_alive(), "the server has not ended"
