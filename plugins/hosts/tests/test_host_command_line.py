"""The commands of hosts, as words."""

from pathlib import Path
from typing import Any

import pytest
from controller.commands.host_commands import Doctor, Worker

from controller.commands.command_line import parse_command
from tests.controller.commands.test_command_line import assert_explains_its_arguments, assert_one_sentence


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
        (["hosts", "slurm", "trainer=1"], "cluster is 'slurm', which is not known; known: 'kubernetes'"),
        (["certs"], "HOST is missing: a host's name as the others know it; see ownloop certs --help"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(words, message, capfd)


@pytest.mark.parametrize("command", ["worker", "hosts", "certs"])
def test_a_command_explains_its_arguments(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_explains_its_arguments(command, capfd)
