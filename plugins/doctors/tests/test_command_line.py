"""The commands that this plug-in brings, as words."""

import pytest

from controller.commands.command_line import parse_command
from ownloop_doctors.check_parts import CheckEngine
from tests.controller.commands.test_command_line import assert_explains_its_arguments, assert_one_sentence
from tests.controller.commands.test_run import refused


def test_words_become_a_command() -> None:
    command = CheckEngine(engine="e", layout=("a=1", "b=2"))
    assert parse_command("check-engine e --layout a=1 --layout b=2".split()) == command


def test_a_mistake_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    assert_one_sentence(["compare"], "compare was given no run; it needs at least two", capfd)


def test_a_long_path_is_not_cut_in_two(capfd: pytest.CaptureFixture[str]) -> None:
    path = f"{'folder/' * 30}curves.pdf"
    assert f"--plot is {path}; " in refused(capfd, "compare", "a", "b", "--plot", path)


def test_a_command_explains_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert_explains_its_arguments("sweep", capfd)
