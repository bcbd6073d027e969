"""Runs the code blocks of README, CONTRIBUTING, CHANGELOG and docs/.

The Python blocks of a page run in order, in one namespace, in a folder that is empty at first. They may use `await`.
Their `launch` starts no processes but returns the trainer and the generator of `tests/docs/in_process.py`, and their
`smollm2-135m-instruct` is a tiny model. The commands of a bash block are checked by `tests/docs/commands.py`, and run
if they only print something; `runs/my-run` is then a finished run, which they may look at. A comment before a
block changes how it is treated:

    <!-- test: file NAME -->        the block is written to a file, which later blocks import or pass to a command
    <!-- test: same as PATH -->     the block equals a file of the repository, which has a test of its own
    <!-- test: in a run -->         the block runs in a folder that holds a finished run, `runs/my-run`
    <!-- test: run -->              all of the block's commands are run
"""

import ast
import asyncio
import importlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import run_command
from tests.docs.commands import RUN, check_command, commands_of, is_cheap, reads_a_run
from tests.docs.in_process import launch_in_process
from tests.docs.loop_runs import run_loop
from tests.docs.pages import PAGES, ROOT, Block, blocks_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
VERBS = ("file ", "same as ", "in a run", "run")


def _name(value: Path | Block) -> str:
    path, line = (value.page, f":{value.line}") if isinstance(value, Block) else (value, "")
    return f"{path.relative_to(ROOT)}{line}"


def _in_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


@pytest.mark.parametrize("page", sorted({block.page for block in _in_language("python")}), ids=_name)
@pytest.mark.usefixtures("in_one_process")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = [block for block in blocks_of(page) if block.language == "python" and not block.argument("same as")]
    with asyncio.Runner() as runner:
        for block in blocks:
            if block.mark == "in a run" and not Path("runs").exists():
                run_loop("grpo", Path("runs/my-run"), checkpoint_every=1)
            if file := block.argument("file"):
                Path(file).write_text(block.text)
                importlib.import_module(Path(file).stem)
            else:
                _execute(block, namespace, runner)
    for block in blocks:
        sys.modules.pop(Path(block.argument("file")).stem, None)


def _write_files(page: Path, folder: Path) -> None:
    """Writes every block of a page that is marked as a file."""
    for block in blocks_of(page):
        if file := block.argument("file"):
            (folder / file).write_text(block.text)


def _execute(block: Block, namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    """Runs a block; a traceback shows its lines in the page."""
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        runner.run(result)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.argument("same as")], ids=_name)
def test_quoted_files_are_up_to_date(block: Block) -> None:
    assert block.text == (ROOT / block.argument("same as")).read_text()


@pytest.mark.parametrize("block", _in_language("bash"), ids=_name)
def test_commands_would_be_accepted(block: Block, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_files(block.page, here)
    monkeypatch.syspath_prepend(here)
    for words in commands_of(block.text):
        check_command(words)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("a_run")
    with pytest.MonkeyPatch.context() as patch:
        launch_in_process(patch, folder / "cache")
        run_loop("grpo", folder / RUN, checkpoint_every=1)
    return folder / RUN


@pytest.mark.parametrize("block", [block for block in _in_language("bash") if block.mark == "run"], ids=_name)
def test_marked_commands_run(block: Block, here: Path) -> None:
    _write_files(block.page, here)
    ownloop = here / ".venv" / "bin" / "ownloop"
    ownloop.parent.mkdir(parents=True)
    ownloop.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m controller.commands.cli "$@"\n')
    ownloop.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


_SHOWN = {
    shlex.join(words): (block.page, words)
    for block in _in_language("bash")
    if block.mark != "run"
    for words in commands_of(block.text)
    if is_cheap(words) or reads_a_run(words)
}


@pytest.mark.seconds
@pytest.mark.parametrize(("page", "words"), _SHOWN.values(), ids=_SHOWN)
def test_commands_that_print_something_do(
    page: Path, words: list[str], here: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_files(page, here)
    if reads_a_run(words):
        shutil.copytree(request.getfixturevalue("a_run"), here / RUN)
    program, *arguments = words
    if program.endswith("python"):
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        assert run_command(arguments) == 0


@pytest.mark.parametrize("block", BLOCKS, ids=_name)
def test_blocks_say_what_they_are(block: Block) -> None:
    assert block.language in ("python", "bash", "text")
    assert not block.mark or block.mark.startswith(VERBS), f"no test knows {block.mark!r}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{target} does not exist"
