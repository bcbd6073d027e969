"""Every benchmark of the core runs in its smallest form, so that none rots."""

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS, ON_REQUEST, module_of
from benchmarks.harness import REPOSITORY
from tests.benchmarks.smallest_form import benchmark_names, check_smallest_form, check_smallest_form_here, numbers

SCRIPTS = benchmark_names(REPOSITORY / "benchmarks")
HERE: dict[str, Any] = {
    "attention": (),
    "controller_scale": (),
    "layouts": pytest.mark.slow,
    "recording": (),
    "split_invariance": pytest.mark.ranks,
}
"""Those that run in the test's own process; the others start vLLM or several meshes, and take 30 to 60 s each."""
FAKE_TRL = Path(__file__).parent / "fake_trl"


def test_every_script_is_known_to_make_bench() -> None:
    known = {*BENCHMARKS, *ON_REQUEST}
    assert set(benchmark_names(REPOSITORY / "benchmarks", *REPOSITORY.glob("plugins/*/benchmarks"))) == known
    for name in known:
        assert (REPOSITORY / module_of(name).replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in HERE.items()])
def test_smallest_form_here(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    check_smallest_form_here(name, monkeypatch, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in HERE])
def test_smallest_form(name: str, tmp_path: Path) -> None:
    check_smallest_form(name, ["--trl-python", str(python_with_fake_trl(tmp_path))] if name == "vs_trl" else [])


def python_with_fake_trl(folder: Path) -> Path:
    """An interpreter that finds `fake_trl` in the place of TRL, which would have to be installed from the network."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE_TRL}{os.pathsep}$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_numbers_are_found_wherever_they_are(wrong: float) -> None:
    assert not all(math.isfinite(number) for number in numbers({"a": [1, {"b": wrong}], "c": "text"}))
