"""The commands of the plug-in: their arguments."""

from pathlib import Path
from typing import Any

import pytest

from controller.commands.cli import main
from controller.commands.command_line import parse_command
from ownloop_hosts.host_commands import Doctor, Worker
from tests.controller.commands.test_run import refused


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("worker --certs - --lost-after 3 --listen n1:9", Worker(listen="n1:9", certs=Path("-"), lost_after=3.0)),
        ("doctor --hosts a b --mb 3 --hosts=c", Doctor(hosts=("a", "b", "c"), mb=3)),
    ],
)
def test_words_become_a_command(words: str, command: Any) -> None:
    assert parse_command(words.split()) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hosts", "slurm", "trainer=1"], "cluster is 'slurm', which is not known; known: kubernetes"),
        (["certs"], "HOST is missing: a host's name as the others know it; see ownloop certs --help"),
        (["doctor", "--hosts", "none"], "--hosts is none; name hosts to examine"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = refused(capfd, *words)
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", "worker hosts certs doctor".split())
def test_a_command_explains_its_arguments(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    output = capfd.readouterr()
    assert (stop.value.code, output.err) == (0, "")
    assert output.out.startswith(f"usage: ownloop {command} ")
    assert " (default: " in output.out
