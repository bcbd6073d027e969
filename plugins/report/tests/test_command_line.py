"""The command and the observers that this plug-in brings, by their names."""

import importlib.util

import pytest

from controller.commands.command_line import parse_command
from tests.controller.commands.test_run import refused, write_runs


def test_dashboards_are_listed_with_what_they_need(capfd: pytest.CaptureFixture[str]) -> None:
    assert parse_command(["list", "--plugins"]).run() == 0
    listed = capfd.readouterr().out
    assert "curves, opentelemetry, report, tensorboard, trackio, wandb" in listed
    for name in ("wandb", "trackio", "tensorboard"):
        assert (f"`pip install {name}`" in listed) == (importlib.util.find_spec(name) is None)


@pytest.mark.usefixtures("here")
def test_a_page_is_written_to_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    write_runs("a")
    assert refused(capfd, "report", "a", "--to", ".").startswith("error: --to is ., a folder")
