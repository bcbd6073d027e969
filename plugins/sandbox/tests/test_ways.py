"""A host without a sandbox is refused with the reasons, and root and ordinary users have one."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ownloop_sandbox import Sandbox, find_way, sandboxes, ways
from ownloop_sandbox.sandboxes import check_sandbox
from ownloop_tasks.python_arithmetic import PythonArithmetic
from plugins.sandbox.tests.here import REAL, need
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[3]
REMEMBERED: Any = (find_way, ways.program, ways.bwrap_file, vars(sandboxes)["_built"])


@pytest.fixture(autouse=True)
def nothing_remembered() -> Generator[None]:
    for remembered in REMEMBERED:
        remembered.cache_clear()
    yield
    for remembered in REMEMBERED:
        remembered.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, bwrap: str = "", python: str) -> None:
    """Makes a host on which bwrap, and the Python that a box is made of, are programs of this shell code."""
    for name, code in {"bwrap": bwrap, "python": python}.items():
        (folder / name).write_text(f"#!/bin/sh\n{code}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setattr(
        "shutil.which", lambda name, path=None: str(folder / name) if name == "bwrap" and bwrap else None
    )
    monkeypatch.setattr(ways, "as_nobody", lambda _shown: ())
    monkeypatch.setattr(ways, "_interpreter", lambda: str(folder / "python"))
    monkeypatch.setattr(ways, "find_spec", lambda _name: None)


def test_a_host_without_any_is_refused_with_what_each_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, python="echo unshare: not permitted >&2; exit 1")
    message = r"\(namespaces: unshare: not permitted; bubblewrap: bwrap is not installed\)\. Install bubblewrap.*'none'"
    with pytest.raises(ValueError, match=message):
        find_way()
    for problems in (PythonArithmetic().eval_problems, lambda count: PythonArithmetic().train_problems(0, 0, count)):
        with pytest.raises(ValueError, match=message):
            problems(1)
    monkeypatch.setattr(ways, "_interpreter", lambda: sys.executable)
    find_way.cache_clear()
    assert PythonArithmetic(sandbox="none").eval_problems(1)


def test_a_program_that_does_not_do_its_work_is_no_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, bwrap="exit 0", python="exit 0")
    message = r"namespaces: it ended with status 0; bubblewrap: it ended with status 0"
    with pytest.raises(ValueError, match=message):
        find_way()
    with pytest.raises(ValueError, match=message):
        check_sandbox("auto")


def test_a_host_that_had_no_room_for_a_box_has_one_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, python="exit 1")
    with pytest.raises(ValueError, match="namespaces: it ended with status 1"):
        check_sandbox("namespaces")
    install(tmp_path, monkeypatch, python="printf '\\0\\0\\0\\0s\\0\\0\\0\\0'")
    assert check_sandbox("namespaces") == "namespaces"


def test_what_needs_no_program_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "echo; echo 42"
    install(tmp_path, monkeypatch, bwrap=answer, python=answer)
    assert find_way("auto").name == "namespaces"
    assert find_way("bubblewrap").name == "bubblewrap"


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="sandbox is 'docker', which is not known"):
        find_way("docker")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"PythonArithmetic\.sandbox is 'bubblewarp': .* 'bubblewrap'"):
        PythonArithmetic(sandbox="bubblewarp")  # type: ignore[arg-type]


@pytest.mark.parametrize("sandbox", REAL)
def test_an_ordinary_user_has_the_same(sandbox: Sandbox) -> None:
    need(sandbox)
    code = (
        "import asyncio, os, ownloop_sandbox as s; assert os.geteuid()\n"
        f"print(asyncio.run(s.run_python('print(6 * 7)', sandbox={sandbox!r})))"
    )
    python = next(
        (python for python in PYTHONS if _as_ordinary_user(python, "import ownloop_sandbox").returncode == 0), None
    )
    if python is None:
        pytest.skip(f"an ordinary user can read no Python, or not {ROOT}")
    result = _as_ordinary_user(python, code)
    assert result.stdout == "SandboxResult(output='42', ok=True)\n", result.stderr


PYTHONS = (os.path.realpath(sys.executable), "/usr/bin/python3.12", "/usr/bin/python3.11")
"""The first that an ordinary user can read is taken: the tests' own may lie in a home directory."""


def _as_ordinary_user(python: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code that may import the checkout, not as root. Who has no such Python gets another status than 0."""
    command = [*(ways.as_nobody() if os.geteuid() == 0 else ()), python, "-c", code]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'plugins' / 'sandbox'}"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
