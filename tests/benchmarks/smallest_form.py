"""Runs a benchmark in its smallest form, and checks the result that design.md promises."""

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import REPOSITORY, module_of


def benchmark_names(*folders: Path) -> list[str]:
    """The scripts in these folders that print a result."""
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    return [file.stem for file in files if file.stem != "harness" and "print_result(" in file.read_text()]


def check_smallest_form(name: str, options: Sequence[str] = ()) -> None:
    """Runs a benchmark in a process of its own."""
    check_result(name, json.loads(run_script(module_of(name), ["--smoke", *options]).splitlines()[-1]))


def check_smallest_form_here(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs a benchmark in this process, for those that import only what other tests import here anyway."""
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)  # all later tests would have as many
    importlib.import_module(module_of(name)).main()
    check_result(name, json.loads(capfd.readouterr().out.splitlines()[-1]))


def run_script(module: str, options: Sequence[str]) -> str:
    """The standard output of a script that must succeed."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_result(name: str, result: dict[str, Any]) -> None:
    """The form of design.md, with finite numbers. Whether bars are met says nothing about a tiny model."""
    assert set(result) == {"benchmark", "bars", "figures", "machine", "commit"}
    assert result["benchmark"] == name
    assert result["bars"]
    for bar in result["bars"]:
        assert set(bar) == {"name", "value", "limit", "at_most", "ok"}
    assert result["figures"]
    assert set(result["machine"]) == {"cpu", "cores", "kind", "isa_caps", "python"}
    assert all(math.isfinite(value) for value in numbers([result["bars"], result["figures"]])), result


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)
