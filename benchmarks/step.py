"""Where the seconds of a GRPO step go: the default recipe's own loop for a few steps, phase by phase.

    python -m benchmarks.step [--quick | --smoke] [--steps N] [--recipe NAME]

`idle` is the time between phases. Bar: moving the weights (push + pull) takes at most a tenth of a step.
"""

import argparse
import asyncio
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from controller.loops.grpo import GRPOConfig, train
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from rl.tiny_tasks import EvenWords

PHASES = ("generate", "forward_backward", "optim_step", "push", "pull")
"""The phases that `controller.loops.grpo` times."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="2 steps")
    options_parser.add_argument("--recipe", default="grpo_smollm2_cpu", help="a recipe of the grpo loop")
    options_parser.add_argument("--steps", type=int, default=8, help="steps measured, after a warm-up step")
    options = options_parser.parse_args()
    rows = measure(options)

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


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of the recipe's steps, without the first step and without steps that had nothing to learn from."""
    num_steps = 1 if options.smoke else 2 if options.quick else options.steps
    # The terminal stays free for the figures: libraries and the console write to the run's log.
    with (
        CapturedOutput() as output,
        tempfile.TemporaryDirectory() as folder,
        benchmark_model(smoke=options.smoke) as model,
    ):
        config = load_recipe(find_recipe(options.recipe))
        if not isinstance(config, GRPOConfig):
            raise SystemExit(f"recipe {options.recipe} is not of the grpo loop, whose phases this benchmark knows")
        config = dataclasses.replace(config, num_steps=num_steps + 1, num_eval=1, evaluate_every=num_steps + 1)
        if options.smoke:
            config = dataclasses.replace(config, model=str(model), env=EvenWords(), prompts_per_step=2)
        run_folder = RunFolder(Path(folder) / "run", config)
        output.move_to(run_folder.logs / "controller.log")
        console = Console(sys.stderr if sys.stderr.isatty() else output.terminal)
        asyncio.run(train(config, run_folder, console))
        rows = [row for row in run_folder.metrics() if "seconds_push" in row]
    return rows[1:]


if __name__ == "__main__":
    main()
