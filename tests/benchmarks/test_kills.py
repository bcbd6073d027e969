"""The cells of the kill matrix cover what they promise, and a run that is not whole is noticed."""

import itertools
import json
from dataclasses import astuple
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.kills.cell import Outcome, compare
from benchmarks.kills.fault import (
    NUM_STEPS,
    PROMPTS_PER_STEP,
    Fault,
    Kind,
    LoopName,
    Phase,
    Victim,
    covering_faults,
    few_faults,
)
from controller.runs import RunFolder
from controller.runs.folder import read_metrics
from rl.tiny_tasks import EvenWords
from rl.types import Group
from tests.rl.fakes import completion, single_turn


@pytest.mark.parametrize("seed", [0, 1])
def test_every_two_values_meet_in_a_cell(seed: int) -> None:
    cells = covering_faults(seed)
    assert len(cells) <= 60
    factors = [get_args(factor) for factor in (Victim, Kind, Phase, LoopName)]
    for (i, ones), (j, others) in itertools.combinations(enumerate(factors), 2):
        for pair in itertools.product(ones, others):
            if pair != ("store", "exception"):
                assert any((astuple(cell)[i], astuple(cell)[j]) == pair for cell in cells), pair


def test_another_seed_chooses_other_cells() -> None:
    assert covering_faults(1) == covering_faults(1)
    assert set(covering_faults(1)) != set(covering_faults(2))


def test_the_quick_cells_have_every_kind_loop_and_process() -> None:
    cells = few_faults()
    assert len(cells) == 7
    assert [cell for cell in cells if cell.lora]
    for field, choices in (("kind", get_args(Kind)), ("loop", get_args(LoopName))):
        assert {getattr(cell, field) for cell in cells} == set(choices)
    assert {cell.victim for cell in cells} >= {"trainer", "engine thread", "store", "controller"}
    assert all(cell.possible for cell in cells)


def test_a_fault_reaches_the_run_that_is_told_to_strike_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.kills.fault import fault_from_environment

    assert fault_from_environment() is None
    fault = Fault("store", "SIGSTOP", "pull", "grpo_async", lora=True)
    for name, value in fault.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert fault_from_environment() == (fault, tmp_path)


def _run(path: Path, *, losses: dict[int, float], problems: list[str]) -> Path:
    """A run's folder with these losses of its steps, and these problems trained on in its first step."""
    folder = RunFolder(path, {})
    for step, loss in losses.items():
        folder.log_metrics({"step": float(step), "loss": loss, "seconds_step": float(hash(path) % 7)})
    groups = [
        Group(problem_id=name, prompt=name, rollouts=(single_turn((1, 2), completion("ab"), 1.0),)) for name in problems
    ]
    folder.log_rollouts(1, groups)
    folder.close()
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text(json.dumps({}))
    return path


WHOLE = dict.fromkeys(range(NUM_STEPS + 1), 0.5)
PROBLEMS = [problem.id for problem in EvenWords().train_problems(0, 0, NUM_STEPS * PROMPTS_PER_STEP)]


@pytest.mark.parametrize(
    ("losses", "problems", "repeatable", "note"),
    [
        (WHOLE, PROBLEMS[::-1], True, None),
        ({**WHOLE, 3: 0.6}, PROBLEMS, True, "loss of step 3 is 0.6; without the fault 0.5"),
        ({**WHOLE, 3: 0.5001}, PROBLEMS, True, "loss of step 3 is 0.5001; without the fault 0.5"),
        ({**WHOLE, 3: 0.500001}, PROBLEMS, True, None),
        ({**WHOLE, 3: 0.6}, PROBLEMS, False, None),
        ({step: 0.5 for step in WHOLE if step != 2}, PROBLEMS, False, "steps [0, 1, 3, 4, 5, 6] instead of 0 to 6"),
        (WHOLE, PROBLEMS[1:], False, "groups trained on"),
        (WHOLE, [*PROBLEMS, PROBLEMS[0]], False, "groups trained on"),
        (WHOLE, [*PROBLEMS[1:], PROBLEMS[1]], True, "groups trained on"),
    ],
)
def test_what_differs_from_a_whole_run_is_noted(
    tmp_path: Path, losses: dict[int, float], problems: list[str], repeatable: bool, note: str | None
) -> None:
    whole = _run(tmp_path / "whole", losses=WHOLE, problems=PROBLEMS)
    assert len(read_metrics(whole / "metrics.jsonl")) == NUM_STEPS + 1
    outcome = Outcome("cell")
    hurt = _run(tmp_path / "hurt", losses=losses, problems=problems)
    compare(outcome, hurt, whole if repeatable else None)
    assert outcome.unequal == (note is not None)
    assert note is None or note in outcome.notes[0]


def test_a_run_without_an_exported_model_is_not_whole(tmp_path: Path) -> None:
    hurt = _run(tmp_path / "hurt", losses=WHOLE, problems=PROBLEMS)
    (hurt / "model" / "config.json").unlink()
    outcome = Outcome("cell")
    compare(outcome, hurt, None)
    assert outcome.notes == ["no exported model"]
