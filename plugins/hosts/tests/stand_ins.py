"""Programs of a cluster that stand in for the real ones, as shell scripts in a folder of PATH. Workers are real."""

import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

SSH = """
while [ "$1" != -- ]; do echo "$1" >> "$STAND_INS/ssh-options"; shift; done
case $2 in
  *127.0.0.1) exec sh -c "$3";;
  127.0.0.2) echo "$2: Permission denied (publickey)." >&2; exit 255;;
  *) echo "ssh: connect to host $2 port 22: No route to host" >&2; exit 255;;
esac
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Puts scripts on PATH, by their names. `$STAND_INS` in them is the folder, which they may write to."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("STAND_INS", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def free_ports(count: int = 10) -> int:
    """The first of so many ports of 127.0.0.1 on which nothing listens. The kernel gives none of them to others."""
    chance = random.SystemRandom()  # processes of pytest may have the same seed
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10  # two processes of pytest never have the same
    while True:
        first = 10_000 + 2000 * worker + chance.randrange(2000 - count)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def running(folder: Path, words: str = "") -> list[int]:
    """The processes for which `install` put this folder on PATH and which have these words in the command line."""
    found = [(each.pid, each.info) for each in psutil.process_iter(["cmdline", "environ"])]
    return [
        pid
        for pid, info in found
        if words in " ".join(info["cmdline"] or []) and str(folder) in (info["environ"] or {}).get("PATH", "")
    ]
