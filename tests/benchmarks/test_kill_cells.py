"""Seven cells of `benchmarks.kill_matrix`: a run whose process is killed, stopped or fails, and what becomes of it.

`make test` resumes runs in `tests/controller/runs/test_resumed_runs.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kills.cell import Cell, hurt, left_alone
from benchmarks.kills.fault import Fault, few_faults
from benchmarks.kills.surroundings import LAYOUT
from rl.tiny_models import SERVABLE, tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model that every run trains."""
    return tiny_llama(tmp_path_factory.mktemp("kills") / "model", **SERVABLE)


@pytest.fixture(scope="module")
def whole(model: Path) -> Callable[[Fault], Path | None]:
    """Fault -> the folder of a run of the same kind without it, where such runs are repeatable."""

    @functools.cache
    def calm(lora: bool) -> Path:
        return left_alone(Cell(model.parent / f"whole-{lora}", model, replace(LAYOUT, lora=lora)))

    return lambda fault: calm(fault.lora) if fault.loop == "grpo" else None


@pytest.mark.parametrize("fault", few_faults(), ids=str)
def test_a_hurt_run_has_the_metrics_of_a_whole_one(
    fault: Fault, model: Path, whole: Callable[[Fault], Path | None], tmp_path: Path
) -> None:
    cell = Cell(tmp_path / "cell", model, fault)
    outcome = hurt(cell, fault, whole(fault))
    assert outcome.ok, f"{outcome}\n{cell.output()}"
