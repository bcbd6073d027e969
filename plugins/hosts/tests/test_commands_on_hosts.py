"""`ownloop export`, `eval` and `parity` start what they need on the hosts that they are given."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from controller.commands.cli import main
from tests.controller.commands.finished_runs import finished_run, in_this_process


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """A finished run; the working directory holds its `runs` and its recipe."""
    folder = tmp_path_factory.mktemp("on_hosts")
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch, folder)
        yield finished_run("a")


@pytest.mark.parametrize("words", [("export", "a", "--to", "there"), ("eval", "a", "mine.py"), ("parity", "mine.py")])
def test_commands_start_what_they_need_on_the_hosts(
    words: tuple[str, ...], run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del run
    monkeypatch.setattr("os.environ", os.environ.copy())  # that other hosts take part is written there for Monarch
    with pytest.raises(SystemExit) as stop:
        main([*words, "--hosts", "ssh", "trainer=n1", "generator=n2", "tls=no", "ssh=no-such-ssh"])
    assert stop.value.code == 2
    assert "error: ssh is 'no-such-ssh', which is no program here" in capfd.readouterr().err
