"""A step of GRPO with `numerics` "bitwise", against the ordinary one, and how many log-probs of either side differ.

    python -m plugins.bitwise.benchmarks.bitwise_step [--quick | --smoke] [--rounds N] [--threads N] [--dtype D]

Both modes have a trainer and a generator of their own, and take turns; who begins alternates. A step samples 128
completions of 16 prompts of SmolLM2, half of them cut or at another temperature, learns from them, pushes and pulls.
Compared are seconds of processor time of all processes, which other work on the machine changes less than the clock.
Bars: as the median of the rounds' ratios a step takes at most 1.25 times as long; and no log-prob of a sampled token
differs between trainer and generator.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from benchmarks.rounds import timed
from controller.launching.launcher import launch
from generator.config import GeneratorConfig
from rl.protocols import Generator, Trainer
from rl.rollouts.episodes import rollout_to_datum
from rl.system.hardware import cpu_dtype
from rl.types import AdamParams, Datum, Rollout, SamplingParams, Turn
from trainer.config import TrainerConfig

PHASES = ("generate", "forward_backward", "optim_step", "push_and_pull")
KINDS = (
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=8),
    SamplingParams(max_tokens=16, temperature=0.7),
    SamplingParams(max_tokens=16, temperature=1.2, top_p=0.9),
)


@dataclass(slots=True)
class Mode:
    """One of the two, and what its steps took."""

    train: Trainer
    generate: Generator
    cpu: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    num_tokens: int = 0
    num_different: int = 0
    num_completions: int = 0

    async def step(self, prompts: list[tuple[int, ...]], group_size: int, seed: int) -> Mapping[str, float]:
        """One step: seconds of processor time by phase."""
        sampled = await timed(self._sample(prompts, group_size, seed))
        batch: list[Datum] = sampled.result
        learned = await timed(self.train.forward_backward(batch, "importance_sampling"))
        self._compare(batch, learned.result.logprobs)
        update = await timed(self.train.optim_step(AdamParams(learning_rate=1e-5), 1 / len(batch)))
        moved = await timed(self._push_and_pull())
        times = dict(zip(PHASES, (each.cpu for each in (sampled, learned, update, moved)), strict=True))
        return {**times, "step": sum(times.values()), "tokens": float(sum(len(d.tokens) for d in batch))}

    async def _sample(self, prompts: list[tuple[int, ...]], group_size: int, seed: int) -> list[Datum]:
        kinds = [replace(KINDS[i % len(KINDS)], seed=seed + i, ignore_eos=True) for i in range(len(prompts))]
        calls = [self.generate.generate(p, kind, group_size) for p, kind in zip(prompts, kinds, strict=True)]
        return [
            rollout_to_datum(Rollout(turns=(Turn(prompt_tokens=p, completion=c),), reward=0.0), (-1.0) ** i)
            for p, group in zip(prompts, await asyncio.gather(*calls), strict=True)
            for i, c in enumerate(group)
        ]

    async def _push_and_pull(self) -> None:
        await self.generate.pull_model_state_dict(await self.train.push_model_state_dict())

    def _compare(self, batch: list[Datum], logprobs: Any) -> None:
        for datum, scored in zip(batch, logprobs, strict=True):
            where = datum.counted
            self.num_tokens += int(where.sum())
            self.num_different += int((scored[where] != datum.loss_inputs["logprobs"][where]).sum())
        self.num_completions += len(batch)


async def measure(model: Path, options: argparse.Namespace, rounds: int, group_size: int) -> dict[str, Mode]:
    """Runs the steps of both modes."""
    random, words = np.random.default_rng(0), vocab_size(model)
    modes: dict[str, Mode] = {}
    with tempfile.TemporaryDirectory() as logs:
        async with AsyncExitStack() as stack:
            for name, engine, numerics in (("ordinary", "torchtitan", ""), ("bitwise", "bitwise", "bitwise")):
                trainer = TrainerConfig(
                    engine=engine,
                    compute_dtype=options.dtype,
                    num_threads=options.threads,
                    max_tokens_per_microbatch=2048,
                )
                generator = GeneratorConfig(
                    numerics=numerics,
                    dtype=options.dtype,
                    num_threads=options.threads,
                    max_model_len=128,
                    max_num_seqs=128,
                    kept_sets=True,
                )
                sides = await stack.enter_async_context(launch(model, trainer, generator, Path(logs) / name))
                modes[name] = Mode(*sides)
            for turn in range(rounds + 1):
                sizes = random.integers(20, 80, 16)
                prompts = [tuple(random.integers(3, words, size).tolist()) for size in sizes]
                for name in sorted(modes, reverse=turn % 2 == 1):
                    times = await modes[name].step(prompts, group_size, 1000 * turn)
                    print(
                        f"{turn}/{rounds}  {name:<9}" + "   ".join(f"{k} {v:.2f}" for k, v in times.items()), flush=True
                    )
                    if turn:
                        modes[name].cpu.append(times)
    return modes


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="3 rounds")
    options_parser.add_argument("--rounds", type=int, default=8, help="steps measured of each mode, after a first one")
    options_parser.add_argument("--threads", type=int, default=1, help="threads of trainer and generator")
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="of both sides; default: what this CPU does fast")
    options = options_parser.parse_args()
    rounds = 1 if options.smoke else 3 if options.quick else options.rounds
    with benchmark_model(smoke=options.smoke) as model:
        modes = asyncio.run(measure(model, options, rounds, 2 if options.smoke else 8))
    ours, theirs = modes["bitwise"], modes["ordinary"]
    ratios = {
        name: statistics.median(a[name] / b[name] for a, b in zip(ours.cpu, theirs.cpu, strict=True))
        for name in (*PHASES, "step")
    }
    print_result(
        "bitwise_step",
        [
            Bar(name="step_ratio", value=ratios["step"], limit=1.25),
            Bar(name="different_logprobs", value=float(ours.num_different), limit=0.0),
        ],
        {
            "ratios": ratios,
            "completions": ours.num_completions,
            "tokens": ours.num_tokens,
            "different_in_ordinary": theirs.num_different / theirs.num_tokens,
            "rounds": rounds,
            "threads": options.threads,
            "dtype": options.dtype,
        },
    )


if __name__ == "__main__":
    main()
