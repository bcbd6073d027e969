"""docs/metrics.md names every metric that a run of any loop writes, and no other."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.in_process import launch_in_process
from tests.docs.loop_runs import LOOPS, run_loop
from tests.docs.pages import ROOT, names_in_tables

PAGE = ROOT / "docs" / "metrics.md"


def metrics_of_environments(folder: Path) -> set[str]:
    """The keys of `Done(metrics={...})` in a folder's files."""
    calls = (
        node
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Done"
    )
    metrics = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == "metrics")
    keys = (key for value in metrics if isinstance(value, ast.Dict) for key in value.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def names_written(loop: str, run: Path, **changes: Any) -> set[str]:
    """The names in metrics.jsonl of a run, interval ends left out. Call `launch_in_process` first."""
    run_loop(loop, run, **changes)
    names = {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    return {name for name in names if not re.fullmatch(r"eval_.*_(low|high)", name)}


def is_explained(name: str) -> bool:
    """Whether docs/metrics.md has a row for it."""
    return any(_fits(name, pattern) for pattern in names_in_tables(PAGE))


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is that of a row, whose `<parts>` stand for any word."""
    return re.fullmatch(re.sub(r"<\w+>", r"\\w+", pattern), name) is not None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a run of every loop writes."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        launch_in_process(monkeypatch, folder / "cache")
        return {name for loop in LOOPS for name in names_written(loop, folder / loop)}


@pytest.mark.slow  # runs every loop
def test_every_metric_that_a_run_writes_is_explained(written: set[str]) -> None:
    assert [name for name in sorted(written) if not is_explained(name)] == []


@pytest.mark.slow
def test_every_metric_that_is_explained_exists(written: set[str]) -> None:
    assert [p for p in sorted(names_in_tables(PAGE)) if not any(_fits(name, p) for name in written)] == []


def test_every_environment_s_metric_is_explained() -> None:
    assert metrics_of_environments(ROOT / "rl" / "envs") <= names_in_tables(PAGE)


def test_loops_are_all_run() -> None:
    pages = {file.stem for file in (ROOT / "controller" / "loops").glob("*.py")} - {"__init__"}
    assert pages == set(LOOPS)


@pytest.mark.usefixtures("in_one_process")
def test_interval_ends_are_written(tmp_path: Path) -> None:
    run_loop("sft", tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (first, *_) = (row for row in rows if "eval_loss" in row)
    assert first["eval_loss_low"] <= first["eval_loss"] <= first["eval_loss_high"]
