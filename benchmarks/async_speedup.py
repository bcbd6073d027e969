"""What running ahead is worth when the environment is slow: `grpo_async` against `grpo`, the same recipe otherwise.

    python -m benchmarks.async_speedup [--quick | --smoke] [--steps N] [--model DIRECTORY]

The environment sleeps for 2 s on a tenth of the rollouts, drawn at random, so that nearly every step of `grpo` waits
for one. A random Llama of 9 million parameters learns to say even words. It is small enough to learn within minutes on
two cores, and large enough for a step to compute for about as long as a slow answer takes.

`grpo`'s trainer and generator take turns on all cores; those of `grpo_async`, which work at the same time, have half of
them each. Steps per hour are counted from the end of the first step to the end of the last, without evaluations. Bars:
`grpo_async` does 1.5 times as many, no token's staleness exceeds the bound, and the final reward on held-out problems
is not worse (the 95 % interval of the difference, paired by problem, reaches 0). By default both train until they have
converged; with fewer steps `grpo_async` has learned less, because its updates lag by its staleness.
"""

import asyncio
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.harness import Bar, parser, print_result
from controller.commands.output import CapturedOutput
from controller.loops import grpo, grpo_async
from controller.loops.grpo import GRPOConfig
from controller.loops.grpo_async import GRPOAsyncConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from generator.config import GeneratorConfig
from rl.envs.procedural import TextProblem
from rl.rollouts.evaluation import Interval, bootstrap
from rl.tiny_models import tiny_llama
from rl.tiny_tasks import EvenWords, even
from rl.types import SamplingParams
from trainer.config import TrainerConfig

MAX_STALENESS = 2
SLOW_S = 2.0
SLOW_SHARE = 0.1
_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "initializer_range": 0.04,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEvenWords(EvenWords):
    """`EvenWords` whose training answers sometimes take 2 s to score."""

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        problems = EvenWords.train_problems(self, seed, start, count)
        return [dataclasses.replace(problem, score=_slow) for problem in problems]


def _slow(completion: str) -> float:
    if random.random() < SLOW_SHARE:
        time.sleep(SLOW_S)
    return even(completion)


def recipe(model: Path, num_steps: int, num_threads: int, *, prompts_per_step: int = 8) -> GRPOConfig:
    """The recipe of both loops."""
    return GRPOConfig(
        model=str(model),
        env=SlowEvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", num_threads=num_threads, max_tokens_per_microbatch=2048),
        generator=GeneratorConfig(dtype="float32", num_threads=num_threads, max_model_len=64, max_num_seqs=128),
        sampling=SamplingParams(max_tokens=16),
        num_steps=num_steps,
        prompts_per_step=prompts_per_step,
        group_size=8,
        learning_rate=1e-4,
        num_eval=128,
        evaluate_every=num_steps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    steps_per_hour: float
    rows: list[dict[str, float]]
    """The metrics of each step."""
    first_rewards: dict[str, float]
    rewards: dict[str, float]
    """Held-out problem -> reward; `first_rewards` before the first step, `rewards` after the last."""


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="4 steps: too few to learn from, so no bar on the reward")
    options_parser.add_argument("--steps", type=int, default=32)
    options_parser.add_argument("--model", type=Path, help="a Hugging Face directory instead of the random model")
    options = options_parser.parse_args()
    num_steps, prompts_per_step = (2, 1) if options.smoke else (4 if options.quick else options.steps, 8)
    with CapturedOutput() as output, tempfile.TemporaryDirectory() as scratch:
        model = options.model or tiny_llama(Path(scratch) / "model", **_SHAPE)
        synchronous, half = (recipe(model, num_steps, n, prompts_per_step=prompts_per_step) for n in (2, 1))
        fields: dict[str, Any] = {f.name: getattr(half, f.name) for f in dataclasses.fields(GRPOConfig)}
        asynchronous = GRPOAsyncConfig(**fields, max_staleness=MAX_STALENESS)
        console = Console(sys.stderr if sys.stderr.isatty() else output.terminal)
        before = _measure(synchronous, Path(scratch) / "grpo", console)
        after = _measure(asynchronous, Path(scratch) / "grpo_async", console)

    difference = _difference(after.rewards, before.rewards)
    bars = [
        Bar(name="steps_per_hour_ratio", value=after.steps_per_hour / before.steps_per_hour, limit=1.5, at_most=False),
        Bar(name="staleness_max", value=max(row.get("staleness_max", 0.0) for row in after.rows), limit=MAX_STALENESS),
    ]
    if not options.quick and not options.smoke:
        bars.append(Bar(name="reward_difference_high", value=difference.high, limit=0.0, at_most=False))
    print_result(
        "async_speedup",
        bars,
        {
            "steps": num_steps,
            "grpo_steps_per_hour": before.steps_per_hour,
            "grpo_async_steps_per_hour": after.steps_per_hour,
            "grpo_reward_before": statistics.mean(before.first_rewards.values()),
            "grpo_reward": statistics.mean(before.rewards.values()),
            "grpo_async_reward": statistics.mean(after.rewards.values()),
            "reward_difference": [difference.low, difference.mean, difference.high],
            "grpo_generate_s": _median(before, "seconds_generate"),
            "grpo_train_s": _median(before, "seconds_forward_backward") + _median(before, "seconds_optim_step"),
            "grpo_async_wait_s": _median(after, "seconds_wait"),
            "grpo_async_train_s": _median(after, "seconds_forward_backward") + _median(after, "seconds_optim_step"),
            "grpo_async_staleness_mean": statistics.mean(
                row["staleness_mean"] for row in after.rows if "staleness_mean" in row
            ),
        },
    )


def _measure(config: GRPOConfig, path: Path, console: Console) -> Measured:
    """Runs a loop from start to end, in processes of its own."""
    folder = RunFolder(path, config)
    loop = (
        grpo_async.train(config, folder, console)
        if isinstance(config, GRPOAsyncConfig)
        else grpo.train(config, folder, console)
    )
    asyncio.run(loop)
    rows = [row for row in folder.metrics() if "seconds_step" in row]
    assert len(rows) == config.num_steps
    eval_data: dict[int, dict[str, float]] = {0: {}, config.num_steps: {}}
    for file in folder.rollouts.glob("eval-*.parquet"):
        for rollout in pq.read_table(file, columns=["step", "problem_id", "reward"]).to_pylist():
            eval_data[rollout["step"]][rollout["problem_id"]] = rollout["reward"]
    return Measured(
        steps_per_hour=3600 * (len(rows) - 1) / (rows[-1]["time"] - rows[0]["time"]),
        rows=rows,
        first_rewards=eval_data[0],
        rewards=eval_data[config.num_steps],
    )


def _difference(ours: dict[str, float], theirs: dict[str, float]) -> Interval:
    """The difference of the mean rewards, paired by problem."""
    assert ours.keys() == theirs.keys()
    return bootstrap(np.array([ours[problem] - theirs[problem] for problem in theirs]))


def _median(measured: Measured, name: str) -> float:
    """The median of a metric over the steps that have it."""
    return statistics.median(row[name] for row in measured.rows if name in row)


if __name__ == "__main__":
    main()
