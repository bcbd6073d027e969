"""The command and the loggers that this plug-in brings, by their names."""

import importlib.util

import pytest

from controller.commands.command_line import parse_command
from tests.controller.commands.test_command_line import assert_explains_its_arguments


def test_a_command_explains_its_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    assert_explains_its_arguments("report", capfd)


def test_loggers_are_listed_with_what_they_need(capfd: pytest.CaptureFixture[str]) -> None:
    assert parse_command(["list", "--parts"]).run() == 0
    lines = {tuple(line.split()[:2]): line for line in capfd.readouterr().out.splitlines()}
    for name in ("wandb", "trackio", "tensorboard"):
        installed = importlib.util.find_spec(name) is not None
        assert lines["logger", name].endswith(" ready") if installed else f"'.[{name}]'" in lines["logger", name]
