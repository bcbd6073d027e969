"""The commands that this plug-in brings, as words."""

from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import parse_command
from ownloop_server.commands import ExportTinker, Key, Serve
from tests.controller.commands.test_cli import assert_quick
from tests.controller.commands.test_command_line import assert_one_sentence


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            "export --adapter tinker://r/weights/a --folder g",
            ExportTinker(path="tinker://r/weights/a", folder=Path("g"), adapter=True),
        ),
        ("serve --model a --help", Serve(fields=("--model", "a", "--help"))),
        ("key add ann --operator", Key(action="add", name="ann", operator=True)),
    ],
)
def test_words_become_a_command(words: str, command: Any) -> None:
    assert parse_command(words.split()) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["key", "ad"], "action is 'ad', which is not known; did you mean 'add'?"),
        (["key", "add"], "ownloop key add needs the user's NAME"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(words, message, capfd)


@pytest.mark.stranger("F5")
def test_help_and_mistakes_do_not_load_the_stack() -> None:
    assert_quick([(("serve", "--help"), 0, "--port"), (("serve", "--model", "nosuch"), 2, "model 'nosuch' is neither")])
