"""Seven cells of `benchmarks.kill_matrix`: a run whose process is killed, stopped or fails, and what becomes of it.

`.ci/run` runs those too that are slow.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kills.cell import Cell, hurt, left_alone
from benchmarks.kills.fault import Fault, few_faults
from benchmarks.kills.surroundings import LAYOUT
from rl.tiny_models import SERVABLE, tiny_llama

QUICK = {"controller", "one of two replicas"}
"""Victims of the cells that `make test` runs: a run that is resumed, and one that goes on by itself."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model that every run trains."""
    return tiny_llama(tmp_path_factory.mktemp("kills") / "model", **SERVABLE)


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """The folder of a run without a fault."""
    return left_alone(Cell(model.parent / "whole", model, LAYOUT))


@pytest.mark.parametrize(
    "fault", [f if f.victim in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in few_faults()], ids=str
)
def test_a_hurt_run_has_the_metrics_of_a_whole_one(fault: Fault, model: Path, whole: Path, tmp_path: Path) -> None:
    if fault.lora:
        whole = left_alone(Cell(tmp_path / "whole", model, replace(LAYOUT, lora=True)))
    cell = Cell(tmp_path / "cell", model, fault)
    outcome = hurt(cell, fault, whole)
    assert outcome.ok, f"{outcome}\n{cell.output()}"
