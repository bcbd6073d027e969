"""`ownloop serve` as a process of its own, for programs that bring the server that they need."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STARTS_S = 600  # seconds on an idle host, minutes on an overloaded one; a server that ends is noticed at once


@dataclass(slots=True)
class Server:
    """A running server."""

    url: str
    model: Path
    folder: Path
    """What `--folder` says."""
    process: subprocess.Popen[bytes]

    def said(self) -> str:
        """What the server has printed."""
        return (self.folder.parent / "serve.log").read_text()

    def kill(self) -> None:
        """Ends the server's own process with SIGKILL."""
        self.process.kill()
        self.process.wait()


def start(model: Path, folder: Path, *options: str, port: int = 0) -> Server:
    """Starts a server and waits until it serves. `folder` keeps its checkpoints and logs.

    Raises RuntimeError, with what the server printed, if it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # of a checkout that is not installed
    command = [sys.executable, "-m", "controller.commands.cli", "serve", "--model", str(model), "--port", str(port)]
    with (folder / "serve.log").open("ab") as log:
        began = log.tell()
        process = subprocess.Popen(
            [*command, "--folder", str(folder / "gateway"), *options], cwd=folder, env=env, stdout=log, stderr=log
        )
    end = time.monotonic() + _STARTS_S
    while "TINKER_BASE_URL=" not in (said := (folder / "serve.log").read_bytes()[began:].decode(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"the server did not start: {said}")
        time.sleep(0.1)
    url = said.partition("TINKER_BASE_URL=")[2].split()[0]
    return Server(url, model, folder / "gateway", process)


@contextmanager
def served(model: Path, folder: Path, *options: str) -> Generator[Server]:
    """A server that ends with the block."""
    server = start(model, folder, *options)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> None:
    """Ends a server as Ctrl-C does."""
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)  # as Ctrl-C does, so that it ends its own processes
    server.process.wait(60)
