"""Kills, stops and fails every process of a run in every phase, and looks at what becomes of the run.

    python -m benchmarks.kill_matrix [--quick | --smoke] [--lora] [--seed N] [--only TEXT]

A cell is one run of a tiny model with one fault: who is hurt (a trainer's rank, a generator, one of two replicas,
vLLM's engine thread, the weight store, the controller), how (SIGKILL, SIGSTOP, an exception), in which phase of a step,
in `grpo` or in `grpo_async`. A covering array makes every two values of different factors meet in some cell; `--seed`
chooses another. Four more cells have no space left, a read-only folder, little shared memory, or a clock that jumps.
With `--lora` every run trains an adapter instead of the whole model.

A run may go on by itself, or end within 30 s of the fault with an error that names what failed, and then resume. Either
way its metrics must be those of a run without the fault, step for step, to 1e-5. `grpo_async` is not repeatable: there
every group must have been trained on exactly once. No process may be left. Bars: nothing hangs, is left, or is unequal.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Bar, parser, print_result
from benchmarks.kills.cell import Cell, Outcome, hurt, left_alone
from benchmarks.kills.fault import Fault, covering_faults, few_faults
from benchmarks.kills.surroundings import LAYOUT, SURROUNDINGS, Surrounding, endure
from rl.tiny_models import SERVABLE, tiny_llama


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="seven cells")
    options_parser.add_argument("--seed", type=int, default=0, help="chooses the covering array")
    options_parser.add_argument("--lora", action="store_true", help="train an adapter in every cell")
    options_parser.add_argument("--only", default="", help="run the cells whose name contains this text")
    options_parser.add_argument("--keep", type=Path, help="keep the runs of cells that went wrong in this folder")
    options = options_parser.parse_args()
    faults = few_faults()[:1] if options.smoke else few_faults() if options.quick else covering_faults(options.seed)
    if options.lora:
        faults = [replace(fault, lora=True) for fault in faults]
    faults = [fault for fault in faults if options.only in str(fault)]
    surroundings = () if options.smoke or options.quick else SURROUNDINGS
    around: list[Surrounding] = [each for each in surroundings if str(options.only) in str(each)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_cells(faults, around, options.keep or Path(folder), lora=options.lora)
    goes_on = [outcome for outcome in outcomes if outcome.what == "goes on"]
    print_result(
        "kill_matrix",
        [
            Bar(name="hangs", value=sum(outcome.hung for outcome in outcomes), limit=0),
            Bar(name="processes_left", value=sum(outcome.processes_left for outcome in outcomes), limit=0),
            Bar(name="unequal_resumes", value=sum(outcome.unequal for outcome in outcomes), limit=0),
        ],
        {
            "cells": len(outcomes),
            "go_on_by_themselves": len(goes_on),
            "resumed": len(outcomes) - len(goes_on),
            "seconds_to_error_max": max((o.seconds for o in outcomes if o not in goes_on), default=0.0),
            "minutes": (time.monotonic() - begin) / 60,
            "seed": options.seed,
            **{outcome.name: outcome.what for outcome in outcomes},
        },
    )


def run_cells(
    faults: Sequence[Fault], around: Sequence[Surrounding], folder: Path, *, lora: bool = False
) -> list[Outcome]:
    """Runs the cells one after the other, each layout once without a fault before. `lora` is for those `around`."""
    model = tiny_llama(folder / "model", **SERVABLE)
    whole: dict[tuple[int, int, bool], Path] = {}
    plain = replace(LAYOUT, lora=lora)
    outcomes: list[Outcome] = []

    def without_fault(fault: Fault) -> Path:
        """A run of `grpo` in the fault's layout."""
        calm = replace(LAYOUT, victim=fault.victim, lora=fault.lora)
        layout = (calm.num_ranks, calm.num_replicas, calm.lora)
        if layout not in whole:
            whole[layout] = left_alone(Cell(folder / "whole" / "-".join(map(str, layout)), model, calm))
        return whole[layout]

    for case in (*faults, *around):
        place = folder / f"cell-{len(outcomes) + 1:02d}"
        if isinstance(case, Fault):
            whole_run = without_fault(case) if case.loop == "grpo" else None  # `grpo_async` is not repeatable
            outcome = hurt(Cell(place, model, case), case, whole_run)
        else:
            outcome = endure(case, place, model, without_fault(plain), plain)
        outcomes.append(outcome)
        print(f"{len(outcomes):>3}/{len(faults) + len(around)}  {outcome}", flush=True)
    return outcomes


if __name__ == "__main__":
    main()
