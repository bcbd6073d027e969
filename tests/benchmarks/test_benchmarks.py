"""Every benchmark runs in its smallest form and prints the result that design.md promises, so that none rots."""

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, ON_REQUEST
from benchmarks.harness import REPOSITORY
from benchmarks.simulated_hosts import why_not
from plugins.sandbox.tests.here import need

FILES = sorted((REPOSITORY / "benchmarks").glob("*.py"))
SCRIPTS = [file.stem for file in FILES if file.stem != "harness" and "print_result(" in file.read_text()]
# Only what other tests import here anyway.
IN_THIS_PROCESS = {"attention", "delta_rule", "layouts", "split_invariance", "recording", "controller_scale", "sandbox"}
MARKS: dict[str, Any] = {
    "split_invariance": pytest.mark.ranks,
    "attention": (),
    "delta_rule": (),
    "recording": (),
    "controller_scale": (),
    "sandbox": (),
}
"""Of the scripts that run every time; the others start vLLM or several meshes, and take 30 to 60 s each."""
FAKE_TRL = Path(__file__).parent / "fake_trl"


def test_every_script_is_known_to_make_bench() -> None:
    assert set(SCRIPTS) == {*BENCHMARKS, *ON_REQUEST}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, pytest.mark.slow)) for n in SCRIPTS])
def test_smallest_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--smoke"]
    if name in ("hosts", "host_failures") and (reason := why_not()) is not None:
        pytest.skip(reason)
    if name == "sandbox":
        need("auto")
    if name == "vs_trl":
        options += ["--trl-python", str(python_with_fake_trl(tmp_path))]
    if name in IN_THIS_PROCESS:
        monkeypatch.setattr(sys, "argv", [name, *options])
        importlib.import_module(f"benchmarks.{name}").main()
        output = capfd.readouterr().out
    else:
        output = run_script(name, options)
    check_result(name, json.loads(output.splitlines()[-1]))


def run_script(name: str, options: list[str]) -> str:
    """The standard output of a script that must succeed."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def python_with_fake_trl(folder: Path) -> Path:
    """An interpreter that finds `fake_trl` in the place of TRL, which would have to be installed from the network."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE_TRL}{os.pathsep}$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


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


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_are_found_wherever_they_are(wrong: float) -> None:
    assert not all(math.isfinite(number) for number in numbers({"a": [1, {"b": wrong}], "c": "text"}))
