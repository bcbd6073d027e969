"""The page what_fits.md says what `ownloop plan` prints."""

import re
import subprocess
import sys

import pytest

from plugins.plan.tests.what_fits import (
    CARDS,
    COUNTS,
    KINDS,
    MODELS,
    PAGE,
    TOKENS,
    cell,
    cells_of_the_page,
    command,
    printed,
)
from tests.docs.pages import ROOT

Cell = tuple[str, str, str, int]


def plan(words: str) -> str:
    """What a command of `ownloop` prints in a process of its own."""
    run = [sys.executable, "-m", "controller.commands.cli", *words.split()[1:]]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_table_has_every_cell() -> None:
    cells = [(m, k, c, n) for m in MODELS for k in KINDS for c in CARDS for n in COUNTS]
    assert [*cells_of_the_page()] == cells


@pytest.mark.seconds
@pytest.mark.parametrize("place", [("4B", "all weights", "48 GB", 2), ("8B", "all weights", "80 GB", 1)])
def test_some_cells_are_what_the_plan_prints(place: Cell) -> None:
    assert cell(printed(*place)) == cells_of_the_page()[place]


@pytest.mark.slow
@pytest.mark.parametrize("place", cells_of_the_page(), ids=lambda place: " ".join(map(str, place)))
def test_a_cell_is_what_the_plan_prints(place: Cell) -> None:
    assert cell(printed(*place)) == cells_of_the_page()[place]


@pytest.mark.seconds
def test_the_page_quotes_the_command_and_its_cost() -> None:
    text = PAGE.read_text(encoding="utf-8")
    quoted = plan(command("4B", "all weights", "48 GB", 2))
    assert "\n".join(quoted.splitlines()[:4]) in text
    words = command("8B", "LoRA", "80 GB", 8) + " --price 2.69"
    cost = re.search(r"\| ([\d.]+) \|$", plan(words), re.MULTILINE)
    assert cost is not None
    assert f"{float(cost[1]) / TOKENS * 1e6:.2f} dollars buy" in re.sub(r"\s+", " ", text)
