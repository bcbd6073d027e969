"""What evaluations beside training cost: a recipe's own loop, steps with an evaluation beside steps without.

    python -m benchmarks.evaluation_beside [--quick | --smoke] [--cycles N] [--recipe NAME] [--evaluation WHERE]

Every eighth step, or as the recipe says, an evaluation of the recipe's size begins. Trainer and generator have a thread
each, so that on two cores one is idle while the other works, as on GPUs of their own. A generator of its own for
evaluations ("apart") has one, too. The run is made again with evaluations between its steps, and each step does the
same work in both. How much faster or slower the machine was then is seen from the steps far from an evaluation.
Bars: an evaluation makes the steps from one to the next at most 5 % longer, waits included, and no metric of training
differs.
"""

import argparse
import asyncio
import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from controller.commands.output import CapturedOutput
from controller.commands.recipes import find_recipe, load_recipe
from controller.loops.grpo import GRPOConfig, train
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import is_timing
from rl.tiny_tasks import EvenWords

Row = dict[str, float]


class TimedConsole(Console):
    """A console that remembers when each step ended."""

    ends: list[float]

    def step(self, metrics: Mapping[str, float], total_steps: int) -> None:
        """As in the base."""
        self.ends.append(time.perf_counter())
        super().step(metrics, total_steps)


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="as many steps as lie between two evaluations, twice")
    options_parser.add_argument("--recipe", default="grpo_smollm2_cpu", help="a recipe of the grpo loop")
    options_parser.add_argument(
        "--cycles", type=int, default=3, help="evaluations of each run; the first only warms up"
    )
    options_parser.add_argument("--evaluation", default="apart", choices=("apart", "beside"), help="where it is made")
    options = options_parser.parse_args()
    measured, ends, every = measure(options, options.evaluation)
    between, _, _ = measure(options, "between")
    seconds = [end - start for start, end in itertools.pairwise(ends)]  # of steps 2, 3, ..., waits included
    alone = [row["seconds_step"] for row in between[1:]]  # of the same steps without an evaluation
    later = every // 2
    pairs = [*zip(seconds, alone, strict=True)][every - 1 :]  # from the second evaluation on
    cycles = [pairs[start : start + every] for start in range(0, len(pairs), every)]
    drift = statistics.median(with_one / without for cycle in cycles for with_one, without in cycle[later:])
    without_s = drift * statistics.fmean(sum(without for _, without in cycle) for cycle in cycles)
    extra_s = statistics.fmean(sum(with_one for with_one, _ in cycle) for cycle in cycles) - without_s
    differing = [name for pair in zip(measured, between, strict=True) for name in different(*pair)]
    print(f"{f'{every} steps without':<28}{without_s:8.3f} s")
    print(f"{'more for an evaluation':<28}{extra_s:8.3f} s  {extra_s / without_s:7.2%}")
    print_result(
        "evaluation_beside",
        [
            Bar(name="evaluation_share", value=extra_s / without_s, limit=0.05),
            Bar(name="metrics_that_differ", value=len(differing), limit=0),
        ],
        {
            "recipe": options.recipe,
            "evaluation": options.evaluation,
            "evaluate_every": every,
            "seconds_without": without_s,
            "seconds_more": extra_s,
            "drift": drift,
            "seconds_of_steps": [[round(second, 3) for second in pair] for pair in pairs],
            "differing": sorted(set(differing)),
        },
    )


def different(row: Row, other: Row) -> list[str]:
    """The metrics of training in which two rows differ."""
    return [name for name in {*row, *other} if not is_timing(name) and row.get(name) != other.get(name)]


def measure(options: argparse.Namespace, evaluation: str) -> tuple[list[Row], list[float], int]:
    """The metrics of a run's steps, when each ended, and the steps from one evaluation to the next."""
    with (
        CapturedOutput() as output,
        tempfile.TemporaryDirectory(dir=".") as folder,
        benchmark_model(smoke=options.smoke) as model,
    ):
        config = load_recipe(find_recipe(options.recipe))
        if not isinstance(config, GRPOConfig):
            raise SystemExit(f"recipe {options.recipe} is not of the grpo loop, whose steps this benchmark compares")
        every = 2 if options.smoke else config.evaluate_every
        config = dataclasses.replace(
            config,
            num_steps=every * (2 if options.smoke or options.quick else options.cycles),
            evaluate_every=every,
            evaluation=evaluation,
            checkpoint_every=0,
            trainer=dataclasses.replace(config.trainer, num_threads=1),
            generator=dataclasses.replace(config.generator, num_threads=1),
        )
        if options.smoke:
            config = dataclasses.replace(config, model=str(model), env=EvenWords(), prompts_per_step=2, num_eval=4)
        run_folder = RunFolder(Path(folder) / "run", config)
        output.move_to(run_folder.logs / "controller.log")
        console = TimedConsole(sys.stderr if sys.stderr.isatty() else output.terminal)
        console.ends = []
        asyncio.run(train(config, run_folder, console))
        return [row for row in run_folder.metrics() if "seconds_step" in row], console.ends, every


if __name__ == "__main__":
    main()
