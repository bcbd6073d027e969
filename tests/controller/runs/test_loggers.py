"""Loggers of installed packages: one may fail, and one that is missing or misspelt is named."""

from pathlib import Path

import pytest

from controller.runs.folder import RunFolder
from controller.runs.loggers import RunLoggers, check_loggers

METRICS = [
    {"step": 0.0, "eval_reward": 0.25},
    {"step": 1.0, "reward_mean": 0.5},
    {"step": 2.0, "reward_mean": 0.75, "loss": 0.125},
]

FAILING = """
class Failing:
    requires = "json"

    def __init__(self, run, config):
        self.rows = 0

    def log_metrics(self, metrics):
        self.rows += 1
        if self.rows == 2:
            raise ConnectionError("no answer")

    def log_rollouts(self, step, groups, *, split="train"): ...

    def close(self): ...
"""


def test_a_logger_of_an_installed_package_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine-1.0.dist-info").mkdir()
    (tmp_path / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (tmp_path / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[ownloop.loggers]\ngone = failing_logger:Failing\n"
    )
    (tmp_path / "failing_logger.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    folder, warnings = RunFolder(tmp_path / "a", {}), list[str]()
    check_loggers(["gone"])
    loggers = RunLoggers(["gone"], folder, {}, warnings.append)
    for row in METRICS:
        loggers.log_metrics(row)
    loggers.close()
    assert warnings == ["gone is left out from now on: ConnectionError: no answer"]
    assert len(folder.metrics()) == 3


def test_a_logger_that_nothing_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine-1.0.dist-info").mkdir()
    (tmp_path / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (tmp_path / "mine-1.0.dist-info" / "entry_points.txt").write_text("[ownloop.loggers]\nboard = mine_board:Board\n")
    (tmp_path / "mine_board.py").write_text("class Board:\n    requires = 'no_such_package'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"the package no_such_package is not installed"):
        check_loggers(["board"])
    with pytest.raises(ValueError, match="log is 'boardd', which is not known; did you mean 'board'"):
        check_loggers(["boardd"])
