"""The set-up script: what it refuses, and that it recovers from being interrupted."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up reads, in an empty directory whose name has a space."""
    path = tmp_path / "a checkout"
    path.mkdir()
    for name in ("Makefile", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, path)
    shutil.copytree(ROOT / "requirements", path / "requirements")
    for name in ("rl", "controller", "trainer", "generator", "configs"):
        (path / name).mkdir()
    return path


def setup(checkout: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    """`make setup`, finished."""
    command = ["make", "setup", *variables]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=500, check=False)


def fake_python(path: Path, version: str) -> Path:
    """An interpreter of some version, as far as set-up can tell before it uses it."""
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}" && exit 0\nexit 1\n')
    path.chmod(0o755)
    return path


def test_an_unknown_device_names_the_known(checkout: Path) -> None:
    result = setup(checkout, "DEVICE=tpu")
    assert result.returncode != 0
    assert "error: DEVICE is 'tpu'; there is a lock for: cpu gpu" in result.stderr
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkout / "bin"
    folder.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        fake_python(folder / name, "3.9.1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    result = setup(checkout)
    assert result.returncode != 0
    assert "error: Python 3.11 or newer is needed; 'python3' is Python 3.9.1" in result.stderr


def test_help_lists_every_target(checkout: Path) -> None:
    shown = subprocess.run(["make"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    for target in ("train", "test", "test-slow", "lint", "bench", "lock", "clean"):
        assert f"\n  {target} " in shown


def test_locks_pin_every_package_and_name_no_place() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        for line in lock.read_text().splitlines():
            assert line.startswith("#") or "==" in line
            assert "://" not in line


@pytest.mark.slow
def test_an_interrupted_set_up_is_repaired(checkout: Path) -> None:
    process = subprocess.Popen(
        ["make", "setup"], cwd=checkout, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    packages = checkout / ".venv" / "lib"
    end = time.monotonic() + 300
    while not list(packages.glob("python3*/site-packages/[t-z]*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (checkout / ".venv" / "ownloop-stamp").exists()

    again = setup(checkout)
    assert again.returncode == 0, again.stderr
    assert "incomplete; making it anew" in again.stderr
    command = [checkout / ".venv" / "bin" / "ownloop", "--help"]
    assert subprocess.run(command, cwd=checkout, capture_output=True, check=False).returncode != 127

    assert setup(checkout).stderr == ""
    (checkout / ".venv" / "bin" / "uv").unlink()
    repaired = setup(checkout)
    assert repaired.returncode == 0
    assert "incomplete" in repaired.stderr
