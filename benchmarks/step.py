"""Where the seconds of a GRPO step go: the default recipe's own loop for a few steps, phase by phase.

    python -m benchmarks.step [--quick] [--steps N] [--recipe NAME]

`idle` is what no phase accounts for. Bar: moving the weights (push + pull) takes at most a tenth of a step.
"""

import argparse
import asyncio
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, print_result
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from controller.runs.console import Console

PHASES = ("generate", "score", "pack", "forward_backward", "optim_step", "push", "pull")


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="grpo_smollm2_cpu")
    parser.add_argument("--steps", type=int, default=8, help="steps measured, after one that is not")
    parser.add_argument("--quick", action="store_true", help="2 steps")
    options = parser.parse_args()
    num_steps = 2 if options.quick else options.steps
    rows = measure(options.recipe, num_steps)

    step_s = statistics.median(row["seconds_step"] for row in rows)
    phases = {phase: statistics.median(row[f"seconds_{phase}"] for row in rows) for phase in PHASES}
    phases["idle"] = statistics.median(
        row["seconds_step"] - sum(row[f"seconds_{phase}"] for phase in PHASES) for row in rows
    )
    for phase, seconds in phases.items():
        print(f"{phase:<18}{seconds:8.3f} s {seconds / step_s:7.1%}")
    print(f"{'step':<18}{step_s:8.3f} s")
    names = ("generation_tokens_per_s", "training_tokens_per_s", "completion_tokens_mean", "logprob_mismatch_mean")
    print_result(
        "step",
        [Bar(name="sync_share", value=(phases["push"] + phases["pull"]) / step_s, limit=0.10)],
        {
            "recipe": options.recipe,
            "steps": len(rows),
            "seconds_step": step_s,
            **{f"share_{phase}": seconds / step_s for phase, seconds in phases.items()},
            **{name: statistics.median(row[name] for row in rows) for name in names},
        },
    )


def measure(recipe: str, num_steps: int) -> list[dict[str, float]]:
    """The metrics of `num_steps` steps of a recipe, after a first one that is left out."""
    from controller.loops.grpo import run
    from rl.runs.folder import RunFolder

    with CapturedOutput() as output, tempfile.TemporaryDirectory() as folder:
        config: Any = load_recipe(find_recipe(recipe))
        config = dataclasses.replace(config, num_steps=num_steps + 1, num_eval=1, evaluate_every=num_steps + 1)
        run_folder = RunFolder(Path(folder) / "run", config)
        output.move_to(run_folder.logs / "controller.log")
        console = Console(sys.stderr if sys.stderr.isatty() else output.terminal)
        asyncio.run(run(config, run_folder, console))
        rows = [row for row in run_folder.metrics() if "seconds_push" in row]
    return rows[1:]


if __name__ == "__main__":
    main()
