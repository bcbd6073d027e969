"""What drafts from history bring: SmolLM2 with and without, side by side in one process.

    python -m plugins.speculation.benchmarks.drafts [--quick | --smoke] [--passes N] [--dtype D]

Two engines answer four grade-school problems, pass by pass in turn. The history of each pass is that of a first epoch,
eight answers to every problem, so that a pass is of the second epoch of a run: twice as many answers to every problem
as requests run, at most 16, so that hardly any step runs fewer. Ratios are of sampled tokens per second and
per CPU second, with drafts over without: the sum of all passes. A pass of the greedy case answers what the first
epoch has answered greedily, as an evaluation of the same problems does.
"""

import asyncio
import copy
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Bar, benchmark_model, parser, print_result
from generator.config import GeneratorConfig, Speculation
from generator.options import cpu_block_size, generator_env
from ownloop_speculation.replay import Request
from rl.system.hardware import cpu_dtype
from rl.types import Completion, SamplingParams

if TYPE_CHECKING:  # the import loads vLLM
    from generator.engine import GenerationEngine
    from ownloop_speculation.history import History
    from ownloop_speculation.rule import DraftRule

QUESTIONS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?",
    "James writes a 3-page letter to 2 different friends twice a week. How many pages does he write a year?",
    "Tina makes $18.00 an hour. If she works 10 hours every day for 5 days, how much money does she make?",
)
CASES = {"0.6": (1, 2, 4), "0": (1, 4), "1": (1, 32)}
"""Temperature -> requests that run at the same time."""
BARS = {("0.6", 1): 1.3, ("0.6", 2): 1.3, ("0.6", 4): 1.3, ("0", 1): 1.3, ("0", 4): 1.3, ("1", 32): 0.98}


@dataclass
class Tally:
    """Tokens, seconds and CPU seconds of the passes of one engine."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    passes: list[list["Request"]] = field(default_factory=list[list["Request"]])


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one pass of each case")
    options_parser.add_argument("--passes", type=int, default=5)
    options_parser.add_argument("--dtype", default=cpu_dtype(), help="default: what this CPU does fast")
    options = options_parser.parse_args()
    _restart_in_environment()
    passes = 1 if options.smoke or options.quick else options.passes
    with benchmark_model(smoke=options.smoke) as model:
        prompts = [[3 + number] * 8 for number in range(4)] if options.smoke else prompts_of(model)
        figures, bars = measure(model, options.dtype, passes, prompts, max_tokens=4 if options.smoke else 64)
    for name, value in figures.items():
        print(f"{name:<52}{value:8.3f}" if isinstance(value, float) else f"{name:<52}{value!s:>8}")
    print_result("drafts", bars, figures)


def _restart_in_environment() -> None:
    """Begins this process anew in the environment of a generator's rank, part of which is read at its start."""
    env = generator_env(GeneratorConfig())
    if any(os.environ.get(name) != value for name, value in env.items()):
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **env})


def measure(
    model: Path, dtype: Any, passes: int, prompts: Sequence[Sequence[int]], *, max_tokens: int
) -> tuple[dict[str, Any], list[Bar]]:
    """Figures and bars of all cases."""
    config = GeneratorConfig(model=model, dtype=dtype, max_model_len=max_tokens + 128, max_num_seqs=32)
    plain, drafting = build(config), build(replace(config, speculation=Speculation()))
    figures: dict[str, Any] = {"dtype": dtype, "passes": passes, "max_tokens": max_tokens}
    bars: list[Bar] = []
    for temperature, batches in CASES.items():
        sampling = SamplingParams(max_tokens=max_tokens, temperature=float(temperature), seed=1)
        for engine in (plain, drafting):
            forget(engine)
            asyncio.run(answer(engine, prompts, sampling, 8, 32))
        kept = copy.deepcopy(drafter_of(drafting).history)
        for running in batches:
            without, with_drafts = Tally(), Tally()
            for number in range(passes):
                drafter_of(drafting).history = copy.deepcopy(kept)
                of_pass = replace(sampling, seed=1_000_000 + 1000 * running + number)
                pairs = [(plain, without), (drafting, with_drafts)]
                for engine, tally in pairs if number % 2 else pairs[::-1]:
                    timed_pass(engine, prompts, of_pass, running, tally)
            name = f"temperature_{temperature}_running_{running}"
            figures |= ratios(name, without, with_drafts)
            rule = drafter_of(drafting).rule
            figures[f"predicted_speed_{name}"] = predicted_speed(
                with_drafts, kept, rule, running, cpu_block_size(dtype)
            )
            figures |= {f"ms_{cost}_{name}": 1e3 * value for cost, value in rule.costs().items()}
            measured = figures[f"cpu_speed_{name}"]
            figures[f"prediction_error_{name}"] = abs(figures[f"predicted_speed_{name}"] / measured - 1)
            bars.append(Bar(name=f"prediction_error_{name}", value=figures[f"prediction_error_{name}"], limit=0.1))
            if (temperature, running) in BARS:
                limit = BARS[temperature, running]
                bars.append(Bar(name=f"cpu_speed_{name}", value=measured, limit=limit, at_most=False))
    plain.close()
    drafting.close()
    return figures, bars


def build(config: GeneratorConfig) -> "GenerationEngine":
    """An engine in this process."""
    from generator.engine import GenerationEngine

    return GenerationEngine(config)


def drafter_of(engine: "GenerationEngine") -> Any:
    """The drafter of an engine's rank."""
    return engine.llm.model_executor.driver_worker.model_runner.drafter  # pyright: ignore[reportAttributeAccessIssue]


def forget(engine: "GenerationEngine") -> None:
    """Begins a history anew, where there is one."""
    if (drafter := getattr(engine.llm.model_executor.driver_worker.model_runner, "drafter", None)) is not None:  # pyright: ignore[reportAttributeAccessIssue]
        from ownloop_speculation.history import History

        drafter.history = History(max_tokens=1 << 20)


def prompts_of(model: Path) -> list[Sequence[int]]:
    """The questions as a model reads them."""
    from rl.rollouts.rendering import Renderer

    renderer = Renderer(model)
    return [renderer.encode([{"role": "user", "content": f"{each} Think step by step."}]) for each in QUESTIONS]


async def answer(
    engine: "GenerationEngine",
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    num_answers: int,
    running: int,
) -> list[Completion]:
    """So many answers to every prompt. `running` run at a time while some wait: one that ends gives way to the next."""
    core: Any = engine.llm.engine_core
    core.engine_core.scheduler.max_num_active_reqs = running

    async def one(number: int) -> Completion:
        of_answer = replace(sampling, seed=(sampling.seed or 0) + 100_000 * number)
        return (await engine.generate(prompts[number % len(prompts)], of_answer))[0]

    return await asyncio.gather(*(one(number) for number in range(num_answers * len(prompts))))


def timed_pass(
    engine: "GenerationEngine", prompts: Sequence[Sequence[int]], sampling: SamplingParams, running: int, tally: Tally
) -> None:
    """Adds one pass over all prompts to a tally: five to ten seconds of work, however many requests run."""
    engine.load.take()
    began, cpu_began = time.perf_counter(), time.process_time()
    num_answers = min(2 * running, 16)
    found = asyncio.run(answer(engine, prompts, sampling, num_answers, running))
    tally.seconds += time.perf_counter() - began
    tally.cpu_seconds += time.process_time() - cpu_began
    tally.tokens += sum(len(each.tokens) for each in found)
    tally.metrics.append(engine.load.take())
    tally.passes.append(
        [Request(tuple(prompts[i % len(prompts)]), each.tokens, 0, each.logprobs) for i, each in enumerate(found)]
    )


def predicted_speed(tally: Tally, history: "History", costs: "DraftRule", running: int, block_size: int) -> float:
    """What `ownloop drafts` says of these passes, by these costs of a step. The prompts' keys and values are cached."""
    from ownloop_speculation.replay import PrefixCache, replay
    from ownloop_speculation.rule import DraftRule

    curve, seconds = costs.costs(), [0.0, 0.0]
    beside = [curve.pop(name) for name in ("check", "look", "prompt")]
    for place, most in enumerate((0, 8)):
        rule, prefixes = DraftRule.with_costs(list(curve.values()), *beside), PrefixCache(block_size)
        for requests in tally.passes:
            for request in requests:
                prefixes.add(request)
            known = copy.deepcopy(history)
            found = replay(requests, known, rule, prefixes, running=running, max_draft=most, min_chance=0.2)
            seconds[place] += found.seconds
    return seconds[0] / seconds[1]


def ratios(name: str, without: Tally, with_drafts: Tally) -> dict[str, float]:
    """What drafts bring in one case."""

    def mean(metric: str) -> float:
        return sum(each[metric] for each in with_drafts.metrics) / len(with_drafts.metrics)

    speed, cpu = with_drafts.tokens / with_drafts.seconds, with_drafts.tokens / with_drafts.cpu_seconds
    return {
        f"speed_{name}": speed / (without.tokens / without.seconds),
        f"cpu_speed_{name}": cpu / (without.tokens / without.cpu_seconds),
        f"tokens_per_step_{name}": mean("engine_tokens_per_step"),
        f"accepted_{name}": mean("engine_accepted_tokens") / max(1.0, mean("engine_draft_tokens")),
        f"seconds_saved_{name}": mean("engine_draft_seconds_saved"),
        f"seconds_saved_as_measured_{name}": (
            without.seconds / without.tokens * with_drafts.tokens - with_drafts.seconds
        )
        / len(with_drafts.metrics),
    }


if __name__ == "__main__":
    main()
