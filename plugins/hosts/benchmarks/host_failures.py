"""Hurts one of several hosts of a run in every phase of a step, and looks at what becomes of the run.

    python -m plugins.hosts.benchmarks.host_failures [--quick | --smoke]
        [--cells N-M,...] [--only TEXT] [--outcomes FILE]

Needs root: the hosts are simulated, as in `hosts`. A cell is one run of `grpo` on a tiny model with one fault: a host
is cut off for good or for ten seconds, its worker is killed, all of its processes are stopped, or the controller is
killed; while a call is in flight, or between two calls. Twenty-five cells have every kind of fault in every phase, and
hurt trainer's and generator's hosts in each.

`--cells 1-4,7` runs some of them. With `--outcomes` the outcome of each cell is kept in a file, and the result is that
of all cells in it: so the cells can be run in parts.

The run names a lost host within 30 s of the fault. It continues by itself on the hosts that are left, or ends and is
resumed. Either way its metrics are those of a run without the fault, to 1e-5. Ten seconds of interruption go unnoticed.
What ran on a host has ended 30 s later. Bars: nothing hangs, is left, or is unequal.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import Bar, parser, print_result
from benchmarks.kills.cell import Outcome
from plugins.hosts.benchmarks.on_hosts import covering_host_faults, hurt_host, whole_run
from rl.tiny_models import SERVABLE, tiny_llama


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="two cells")
    options_parser.add_argument("--cells", default="", help="run only these, such as 1-4,7")
    options_parser.add_argument("--only", default="", help="run the cells whose name contains this text")
    options_parser.add_argument("--outcomes", type=Path, help="a file that outcomes of cells are added to")
    options_parser.add_argument("--keep", type=Path, help="keep the runs of cells that went wrong in this folder")
    options = options_parser.parse_args()
    faults = covering_host_faults()
    faults = faults[:1] if options.smoke else faults[1:3] if options.quick else faults
    if options.cells:
        faults = [faults[index - 1] for index in _numbers(options.cells)]
    faults = [fault for fault in faults if options.only in str(fault)]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        model = tiny_llama(folder / "model", **SERVABLE)
        whole = whole_run(folder / "whole", model)
        outcomes: list[Outcome] = []
        for index, fault in enumerate(faults):
            outcomes.append(hurt_host(fault, folder / f"cell-{index + 1:02d}", model, whole))
            print(outcomes[-1], flush=True)
            if options.outcomes is not None:
                keep(options.outcomes, outcomes[-1])
    if options.outcomes is not None:
        outcomes = kept_in(options.outcomes)
    ended = [outcome for outcome in outcomes if not outcome.what.startswith("goes on")]
    print_result(
        "host_failures",
        [
            Bar(name="hangs", value=sum(outcome.hung for outcome in outcomes), limit=0),
            Bar(name="processes_left", value=sum(outcome.processes_left for outcome in outcomes), limit=0),
            Bar(name="unequal_resumes", value=sum(outcome.unequal for outcome in outcomes), limit=0),
        ],
        {
            "cells": len(outcomes),
            "go_on_by_themselves": len(outcomes) - len(ended),
            "seconds_until_ended_max": max((outcome.seconds for outcome in ended), default=0.0),
            **{outcome.name: outcome.what for outcome in outcomes},
        },
    )


def _numbers(text: str) -> list[int]:
    """The numbers in "1-4,7"."""
    ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [number for ends in ranges for number in range(ends[0], ends[-1] + 1)]


def keep(file: Path, outcome: Outcome) -> None:
    """Adds an outcome to a file."""
    with file.open("a") as stream:
        stream.write(json.dumps(asdict(outcome)) + "\n")


def kept_in(file: Path) -> list[Outcome]:
    """The outcomes in a file, in the order of the cells; of a cell that ran again, the newest."""
    found = {each.name: each for each in (Outcome(**json.loads(line)) for line in file.read_text().splitlines())}
    return [found[str(fault)] for fault in covering_host_faults() if str(fault) in found]


if __name__ == "__main__":
    main()
