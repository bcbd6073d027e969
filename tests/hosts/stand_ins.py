"""Programs of a cluster that stand in for the real ones, as shell scripts in a folder of PATH. Workers are real."""

import os
from pathlib import Path

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
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
