"""docs/metrics.md names every metric that a run of any loop writes, and no other."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.docs.in_process import launch_in_process
from tests.docs.loop_runs import LOOPS, run_loop
from tests.docs.pages import ROOT


def _names_on_page() -> set[str]:
    """Everything in code type in the first cell of a table's row."""
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def _environment_names() -> set[str]:
    """The keys of `Done(metrics={...})` in rl/envs."""
    calls = (
        node
        for file in (ROOT / "rl" / "envs").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Done"
    )
    metrics = (keyword.value for call in calls for keyword in call.keywords if keyword.arg == "metrics")
    keys = (key for value in metrics if isinstance(value, ast.Dict) for key in value.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in metrics.jsonl of a run of every loop, interval ends left out."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        launch_in_process(monkeypatch, folder / "cache")
        for loop in LOOPS:
            run_loop(loop, folder / loop)
    names = {
        name
        for loop in LOOPS
        for line in (folder / loop / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    }
    return {name for name in names if not re.fullmatch(r"eval_.*_(low|high)", name)}


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is that of a row, whose `<parts>` stand for any word."""
    return re.fullmatch(re.sub(r"<\w+>", r"\\w+", pattern), name) is not None


@pytest.mark.slow  # runs every loop
def test_every_metric_that_a_run_writes_is_explained(written: set[str]) -> None:
    page = _names_on_page()
    assert [name for name in sorted(written) if not any(_fits(name, pattern) for pattern in page)] == []


@pytest.mark.slow
def test_every_metric_that_is_explained_exists(written: set[str]) -> None:
    known = written | _environment_names()
    assert [pattern for pattern in sorted(_names_on_page()) if not any(_fits(name, pattern) for name in known)] == []


def test_every_environment_s_metric_is_explained() -> None:
    assert _environment_names() <= _names_on_page()


def test_loops_are_all_run() -> None:
    pages = {file.stem for file in (ROOT / "controller" / "loops").glob("*.py")} - {"__init__"}
    assert pages == set(LOOPS)


def test_interval_ends_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch_in_process(monkeypatch, tmp_path / "cache")
    run_loop("sft", tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (first, *_) = (row for row in rows if "eval_loss" in row)
    assert first["eval_loss_low"] <= first["eval_loss"] <= first["eval_loss_high"]
