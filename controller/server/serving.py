"""Runs a server: the processes of its models, and the gateway before them."""

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import socket
from collections.abc import Generator, Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path

import uvicorn

from controller.server.app import make_app
from controller.server.config import ServeConfig, is_this_host
from controller.server.gateway import Gateway
from controller.server.hosting import Say, host
from controller.server.keys import Keys, needs_keys
from controller.server.monitoring import log
from rl.startup import without_walking_what_exists

LOG_BYTES = 64 * 2**20
"""The size at which another file of request lines is begun."""
NUM_OLD_LOGS = 2
KEEP_ALIVE_S = 75
"""How long a connection without requests stays open. A client that sends just as it closes sees a broken pipe."""


async def serve(config: ServeConfig, models: Mapping[str, Path], say: Say) -> None:
    """Serves until it is cancelled. `say` is told where, and who trains what.

    `models` are the directories by the names after `--model`. Raises ValueError if the address or the folder is taken,
    and for what trainer and generator refuse, before any process starts.
    """
    keys = Keys(config.folder)
    needs_key = needs_keys(config, keys)
    with (
        held(config.folder),
        listen(config.host, config.port) as listener,
        request_log(config.folder / "logs" / "requests.log"),
    ):
        async with contextlib.AsyncExitStack() as stack:
            gateway = Gateway(await host(stack, config, models, say), config.folder, say)
            say(f"serving {', '.join(gateway.models.names)}; checkpoints and logs go to {config.folder}")
            options = uvicorn.Config(
                make_app(gateway, keys, config.limits, needs_key=needs_key),
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="on",
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
            )
            for line in invitation(config, listener, needs_key=needs_key):
                say(line)
            stack.enter_context(without_walking_what_exists())
            await _Server(options).serve_until_cancelled(listener)


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Within the block, a folder is this server's alone. Raises ValueError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"folder {folder} is in use by another server; --folder names another one") from None
        yield


def invitation(config: ServeConfig, listener: socket.socket, *, needs_key: bool) -> list[str]:
    """What clients and people need to know to use the server."""
    host, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else f"[{host}]" if ":" in host else host
    scheme = "http" if config.tls_certificate is None else "https"
    key = "the key of `ownloop key add`" if needs_key else "tml-local"
    lines = [f"clients: export TINKER_BASE_URL={scheme}://{name}:{port} TINKER_API_KEY={key}"]
    if not is_this_host(config.host) and config.tls_certificate is None:
        lines.append(
            "keys and data cross the network unencrypted: give --tls-certificate and --tls-key, or use a tunnel"
        )
    return lines


def listen(host: str, port: int) -> socket.socket:
    """A socket at this address. Raises ValueError if it is taken or not of this host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it an answer takes 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


@contextlib.contextmanager
def request_log(file: Path) -> Generator[None]:
    """Within the block, `monitoring` writes its lines to this file, and older ones are in `<file>.1` and so on."""
    handler = RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=NUM_OLD_LOGS)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, because `ownloop` has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield

    async def serve_until_cancelled(self, listener: socket.socket) -> None:
        """Serves; when cancelled, ends the requests that run."""
        running = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await asyncio.shield(running)
        finally:
            self.should_exit = self.force_exit = True
            await running
