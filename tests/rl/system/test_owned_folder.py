"""Temporary folders of processes that end in order, are killed, or still run."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl.system.disk import OwnedFolder
from tests.waiting import LIMIT_S, wait_for_line

PREFIX = "ownloop-test-"
OWNER = f"""
import sys
from rl.system.disk import OwnedFolder
folder = OwnedFolder({PREFIX!r})
(folder.path / "key.pem").write_text("secret")
print(folder.path, flush=True)
sys.stdin.read()
"""


def _owner(folder: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that has a folder and runs until its standard input ends, and the folder."""
    pipe = subprocess.PIPE
    code = [sys.executable, "-c", OWNER]
    process = subprocess.Popen(code, stdin=pipe, stdout=pipe, text=True, env={"TMPDIR": str(folder), "PYTHONPATH": "."})
    return process, Path(wait_for_line(process.stdout, "the folder"))


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{PREFIX}mine").mkdir()  # somebody else's, who has no lock
    (killed, left), (running, held), (ended, gone) = (_owner(tmp_path) for _ in range(3))
    for process in (killed, ended):
        process.kill() if process is killed else process.communicate("", timeout=LIMIT_S)
    killed.wait(LIMIT_S)
    assert ended.returncode == 0
    assert not gone.exists()
    assert (left / "key.pem").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = OwnedFolder(PREFIX)
    assert {each.name for each in tmp_path.iterdir()} == {f"{PREFIX}mine", held.name, folder.path.name}
    assert (held / "key.pem").read_text() == "secret"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    running.communicate("", timeout=LIMIT_S)


def test_temporary_files_go_there_only_meanwhile() -> None:
    before, folder = tempfile.gettempdir(), OwnedFolder(PREFIX)
    with folder.takes_temporary_files():
        assert Path(tempfile.mkdtemp()).parent == folder.path
    assert tempfile.gettempdir() == before
    folder.remove()
