"""What checkpoints cost: the default recipe's own loop, steps after a save beside steps that no save is near.

    python -m benchmarks.checkpoint_cost [--quick | --smoke] [--saves N] [--recipe NAME]

A save costs the copy of the state, for which the loop waits, and what the write in the background takes from the steps
that follow. So its cost is the time of the next few steps beyond that of as many steps without a save. The learning
rate is 0, so that the steps stay alike. Bar: with the recipe's `checkpoint_every`, saves cost at most 2 % of its steps.
"""

import argparse
import asyncio
import dataclasses
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from controller.loops.grpo import GRPOConfig, train
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from rl.tiny_tasks import EvenWords

STEPS_NEAR_A_SAVE = 2
"""Steps after a save that count as its own; as many follow that do not. A write must take less time than they do."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one save")
    options_parser.add_argument("--recipe", default="grpo_smollm2_cpu", help="a recipe of the grpo loop")
    options_parser.add_argument("--saves", type=int, default=4, help="saves measured")
    options = options_parser.parse_args()
    rows, every = measure(options)

    blocking, step_s, extra = costs(rows)
    cost_s = statistics.median(extra)
    print(f"{'step without a save':<24}{step_s:8.3f} s")
    print(f"{'waiting for the copy':<24}{statistics.median(blocking):8.3f} s")
    print(f"{'a save, all in all':<24}{cost_s:8.3f} s  {cost_s / (every * step_s):7.2%} of {every} steps")
    print_result(
        "checkpoint_cost",
        [Bar(name="checkpoint_share", value=cost_s / (every * step_s), limit=0.02)],
        {
            "recipe": options.recipe,
            "checkpoint_every": every,
            "saves": len(extra),
            "seconds_step": step_s,
            "seconds_copy": statistics.median(blocking),
            "seconds_save": cost_s,
            "seconds_save_each": extra,
        },
    )


def costs(rows: Sequence[dict[str, float]]) -> tuple[list[float], float, list[float]]:
    """Seconds that the loop waited for each save, of a step without a save, and that each save cost.

    `rows` are the metrics of the steps from one save on: saves follow step 0, 4, 8, ... of them.
    """
    seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(rows)]
    period = 2 * STEPS_NEAR_A_SAVE
    alone = [second for index, second in enumerate(seconds) if index % period >= STEPS_NEAR_A_SAVE]
    step_s = statistics.median(alone)
    starts = range(0, len(seconds), period)
    blocking = [seconds[start] - rows[start + 1]["seconds_step"] for start in starts]
    extra = [sum(seconds[start : start + STEPS_NEAR_A_SAVE]) - STEPS_NEAR_A_SAVE * step_s for start in starts]
    return blocking, step_s, extra


def measure(options: argparse.Namespace) -> tuple[list[dict[str, float]], int]:
    """The metrics of the recipe's steps from a save on, and the recipe's `checkpoint_every`.

    That is the second save: the first one allocates what later ones use again. Short forms measure the first.
    """
    short, period = options.smoke or options.quick, 2 * STEPS_NEAR_A_SAVE
    saves, first_save = (1, 1) if short else (options.saves, 2)
    # The terminal stays free for the figures: libraries and the console write to the run's log.
    with (
        CapturedOutput() as output,
        tempfile.TemporaryDirectory(dir=".") as folder,  # the disk that runs/ is on, not one in memory
        benchmark_model(smoke=options.smoke) as model,
    ):
        config = load_recipe(find_recipe(options.recipe))
        if not isinstance(config, GRPOConfig):
            raise SystemExit(f"recipe {options.recipe} is not of the grpo loop, whose steps this benchmark compares")
        every, num_steps = config.checkpoint_every, (first_save + saves) * period
        config = dataclasses.replace(
            config,
            num_steps=num_steps,
            learning_rate=0.0,
            num_eval=1,
            evaluate_every=num_steps + 1,
            checkpoint_every=period,
        )
        if options.smoke:
            config = dataclasses.replace(config, model=str(model), env=EvenWords(), prompts_per_step=2)
        run_folder = RunFolder(Path(folder) / "run", config)
        output.move_to(run_folder.logs / "controller.log")
        console = Console(sys.stderr if sys.stderr.isatty() else output.terminal)
        asyncio.run(train(config, run_folder, console))
        rows = [row for row in run_folder.metrics() if "seconds_step" in row]
    first = first_save * period - 1  # the row of the step that this save follows
    return rows[first : first + saves * period + 1], every


if __name__ == "__main__":
    main()
