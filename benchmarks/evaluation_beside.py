"""What evaluations beside training cost: a recipe's own loop, steps with an evaluation beside steps without.

    python -m benchmarks.evaluation_beside [--quick | --smoke] [--steps N] [--recipe NAME]

Every second step has an evaluation of the recipe's size beside it. Trainer and generator have a thread each, so that on
two cores one is idle while the other works, as on GPUs of their own. Then the run is repeated with evaluations between
its steps. Bars: an evaluation costs at most 5 % of the steps from one to the next, at the recipe's `evaluate_every`,
and no metric of training differs.
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
from controller.runs.comparison import is_timing
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from rl.envs.even_words import EvenWords

Row = dict[str, float]


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="four steps")
    options_parser.add_argument("--recipe", default="grpo_smollm2_cpu", help="a recipe of the grpo loop")
    options_parser.add_argument("--steps", type=int, default=10, help="steps of each run")
    options = options_parser.parse_args()
    beside, every = measure(options, "beside")
    between, _ = measure(options, "between")
    warm = beside[2:] or beside  # the first steps compile kernels and touch memory
    with_one, without = warm[::2], warm[1::2]
    step_s = statistics.median(row["seconds_step"] for row in without)
    extra_s = statistics.median(row["seconds_step"] for row in with_one) - step_s
    waited_s = statistics.median(row["seconds_evaluate"] for row in with_one)
    differing = [name for pair in zip(beside, between, strict=True) for name in different(*pair)]
    print(f"{'step without an evaluation':<28}{step_s:8.3f} s")
    print(f"{'more with one beside it':<28}{extra_s:8.3f} s  {extra_s / (every * step_s):7.2%} of {every} steps")
    print(f"{'of which it was waited for':<28}{waited_s:8.3f} s")
    print_result(
        "evaluation_beside",
        [
            Bar(name="evaluation_share", value=extra_s / (every * step_s), limit=0.05),
            Bar(name="metrics_that_differ", value=len(differing), limit=0),
        ],
        {
            "recipe": options.recipe,
            "evaluate_every": every,
            "seconds_step": step_s,
            "seconds_more": extra_s,
            "seconds_waited": waited_s,
            "differing": sorted(set(differing)),
        },
    )


def different(row: Row, other: Row) -> list[str]:
    """The metrics of training in which two rows differ."""
    return [name for name in {*row, *other} if not is_timing(name) and row.get(name) != other.get(name)]


def measure(options: argparse.Namespace, evaluation: str) -> tuple[list[Row], int]:
    """The metrics of a run's steps, and the recipe's `evaluate_every`."""
    num_steps = 2 if options.smoke else 4 if options.quick else options.steps
    with (
        CapturedOutput() as output,
        tempfile.TemporaryDirectory(dir=".") as folder,
        benchmark_model(smoke=options.smoke) as model,
    ):
        config = load_recipe(find_recipe(options.recipe))
        if not isinstance(config, GRPOConfig):
            raise SystemExit(f"recipe {options.recipe} is not of the grpo loop, whose steps this benchmark compares")
        every = config.evaluate_every
        config = dataclasses.replace(
            config,
            num_steps=num_steps,
            evaluate_every=2,
            evaluation=evaluation,
            checkpoint_every=0,
            trainer=dataclasses.replace(config.trainer, num_threads=1),
            generator=dataclasses.replace(config.generator, num_threads=1),
        )
        if options.smoke:
            config = dataclasses.replace(config, model=str(model), env=EvenWords(), prompts_per_step=2, num_eval=4)
        run_folder = RunFolder(Path(folder) / "run", config)
        output.move_to(run_folder.logs / "controller.log")
        console = Console(sys.stderr if sys.stderr.isatty() else output.terminal)
        asyncio.run(train(config, run_folder, console))
        return [row for row in run_folder.metrics() if "seconds_step" in row], every


if __name__ == "__main__":
    main()
