"""What an adapter costs beside the whole model, and what many adapters cost beside one: SmolLM2, ranks of 32.

    python -m benchmarks.lora [--quick | --smoke] [--rounds N] [--threads N] [--only PART]

Two trainers, one of the whole model and one of adapters over it, and two generators, one without adapters, live in
processes of their own and take turns. Both sides compute in the dtype that the CPU is fast in. Every ratio is taken
within a round, whose sides follow each other directly; the figures are medians over the rounds. `cpu_` figures are
ratios of CPU time, which hold on a machine that does other work as well. Bars:

* `train_speed`: forward_backward's tokens per second. `optim_time_ratio`: optim_step's time.
* `memory_ratio`: the trainer's peak memory. `sync_ratio`: the time of a push and a pull.
* `decode_one`, `decode_four`, `prefill_one`: a generator's tokens per second with requests of one or four adapters.
* `eight_adapters`: tokens per second, sampled and trained, of eight adapters that eight tasks train at once, to one's.

`--only` measures one part: `training`, `generation` or `tasks`.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from benchmarks.rounds import Rounds, Time, timed
from rl.lora import LoRAConfig, Policy
from rl.system.hardware import cpu_dtype
from rl.types import AdamParams, Datum, OptimStepOutput, SamplingParams

if TYPE_CHECKING:  # they load torch, Monarch and vLLM
    from controller.handles.trainer_handle import TrainerHandle
    from rl.protocols import Generator, Trainer

RANK = 32
NUM_ADAPTERS = 8
PROMPT_TOKENS = 16
"""Of a request that is decoded."""
ADAM = AdamParams(learning_rate=1e-5)
LIMITS: Mapping[str, tuple[float, bool]] = {
    "train_speed": (1.0, False),
    "optim_time_ratio": (0.15, True),
    "memory_ratio": (0.65, True),
    "sync_ratio": (0.25, True),
    "decode_one": (0.75, False),
    "decode_four": (0.5, False),
    "prefill_one": (0.7, False),
    "eight_adapters": (0.9, False),
}
"""Every bar's limit, and whether it is the most (or the least) that is accepted."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much work there is."""

    requests: int
    """Requests that are decoded together; a prefill has a quarter as many prompts."""
    new_tokens: int
    prefill_tokens: int
    sequences: int
    """The sequences of a training batch."""
    train_tokens: int
    """The tokens of each sequence."""
    rounds: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Sides:
    """Everything that runs."""

    whole: "Trainer"
    base: "TrainerHandle"
    policy: "Trainer"
    plain: "Generator"
    serving: "Generator"


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="2 rounds of shorter texts")
    options_parser.add_argument("--rounds", type=int, default=3, help="rounds measured, after a warm-up round")
    options_parser.add_argument("--threads", type=int, default=1, help="of each process")
    options_parser.add_argument("--only", choices=list(PARTS), help="the only part to measure")
    options = options_parser.parse_args()
    with benchmark_model(smoke=options.smoke) as model:
        figures = asyncio.run(measure(model, options, _size(options, vocab_size(model))))
    measured = {name: limits for name, limits in LIMITS.items() if name in figures}
    bars = [Bar(name=name, value=figures[name], limit=limit, at_most=most) for name, (limit, most) in measured.items()]
    for bar in bars:
        print(f"{bar.name:<18}{bar.value:8.3f}   {'<=' if bar.at_most else '>='} {bar.limit:g}")
    print_result("lora", bars, {**figures, "rank": RANK, "threads": options.threads, "dtype": cpu_dtype()})


def _size(options: argparse.Namespace, vocabulary: int) -> Size:
    if options.smoke:
        return Size(2, 4, 16, 2, 16, rounds=1, vocabulary=vocabulary)
    if options.quick:
        return Size(16, 8, 64, 4, 128, rounds=2, vocabulary=vocabulary)
    return Size(32, 16, 128, 4, 256, rounds=options.rounds, vocabulary=vocabulary)


async def measure(model: Path, options: argparse.Namespace, size: Size) -> dict[str, float]:
    """All figures by name."""
    figures: dict[str, float] = {}
    begin = time.monotonic()
    async with sides(model, options.threads, size) as running:
        print(f"started after {time.monotonic() - begin:.0f} s", flush=True)
        for name, part in PARTS.items():
            if options.only in (None, name):
                figures |= await part(running, size)
    return {**figures, "rounds": size.rounds, "seconds": time.monotonic() - begin}


@asynccontextmanager
async def sides(model: Path, threads: int, size: Size) -> AsyncGenerator[Sides]:
    """Both trainers and both generators."""
    # Here, because a module that imports Monarch also configures it, for this process and its children.
    from controller.handles.adapters import BoundGenerator
    from controller.handles.trainer_handle import TrainerHandle
    from controller.launching.launcher import Launcher
    from generator.config import GeneratorConfig, LoRALimits
    from trainer.config import TrainerConfig

    lora, dtype = LoRAConfig(rank=RANK), cpu_dtype()
    training = TrainerConfig(compute_dtype=dtype, num_threads=threads, max_tokens_per_microbatch=2048)
    serving = GeneratorConfig(dtype=dtype, num_threads=threads, max_model_len=256, max_num_seqs=max(size.requests, 8))
    room = replace(serving, lora=LoRALimits(max_rank=RANK, max_adapters=4))
    with tempfile.TemporaryDirectory() as folder:
        # A launcher has one trainer that pushes: one's versions are adapters, the other's are whole models.
        async with (
            Launcher(logs := Path(folder)) as launcher,
            Launcher(logs, beside=launcher) as other,
        ):
            policy, base, bound, whole, plain = await asyncio.gather(
                launcher.trainer(model, replace(training, lora=lora), generator=room),
                launcher.reference(model, replace(training, lora=lora)),
                launcher.generator(model, room),
                other.trainer(model, training, generator=serving, name="whole"),
                other.generator(model, serving, name="plain"),
            )
            assert isinstance(base, TrainerHandle)
            assert isinstance(bound, BoundGenerator)
            yield Sides(whole, base, policy, plain, bound.unbound)


async def measure_training(running: Sides, size: Size) -> dict[str, float]:
    """Speed, memory and weight updates of the trainers."""
    batch, rounds = (
        _batch(size.sequences, size.train_tokens, size.vocabulary),
        Rounds("training", size.rounds, shown=LIMITS),
    )
    adapted: tuple[Trainer, Generator, str | None] = (running.policy, running.serving, "policy")
    trainers = {"whole": (running.whole, running.plain, None), "adapter": adapted}
    for turn in range(1 + size.rounds):
        times: dict[str, dict[str, Time]] = {}
        for name in trainers if turn % 2 else reversed(trainers):
            times[name] = {
                "forward_backward": await timed(trainers[name][0].forward_backward(batch, "cross_entropy")),
                "optim_step": await timed(trainers[name][0].optim_step(ADAM)),
                "sync": await timed(_sync(*trainers[name])),
            }
        whole, adapter = times["whole"], times["adapter"]
        peaks = {name: _peak_bytes(of["optim_step"].result) for name, of in times.items()}
        rounds.add(
            turn,
            {
                "train_speed": whole["forward_backward"].wall / adapter["forward_backward"].wall,
                "cpu_train_speed": whole["forward_backward"].cpu / adapter["forward_backward"].cpu,
                "optim_time_ratio": adapter["optim_step"].wall / whole["optim_step"].wall,
                "memory_ratio": peaks["adapter"] / peaks["whole"],
                "sync_ratio": adapter["sync"].wall / whole["sync"].wall,
                **{f"peak_memory_gb_{name}": peak / 1e9 for name, peak in peaks.items()},
                **{f"seconds_{part}_{name}": t.wall for name, of in times.items() for part, t in of.items()},
            },
        )
    return rounds.medians()


async def measure_generation(running: Sides, size: Size) -> dict[str, float]:
    """Tokens per second of the generators."""
    names, rounds = await _adapters(running, "served", 4, size), Rounds("generation", size.rounds, shown=LIMITS)
    cases: dict[str, tuple[Generator, Sequence[Policy]]] = {
        "plain": (running.plain, [None]),
        "one": (running.serving, list(names)[:1]),
        "four": (running.serving, list(names)),
    }
    num_read = max(size.requests // 4, 1)  # prompts of a prefill
    decoded, read = size.requests * size.new_tokens, num_read * size.prefill_tokens
    for turn in range(1 + size.rounds):
        decode, prefill = dict[str, Time](), dict[str, Time]()
        for case in cases if turn % 2 else reversed(cases):
            generator, policies = cases[case]
            prompts = _prompts((turn, 0), size.requests, PROMPT_TOKENS, size)
            decode[case] = await timed(_sample(generator, policies, prompts, size.new_tokens))
            prompts = _prompts((turn, len(policies)), num_read, size.prefill_tokens, size)
            prefill[case] = await timed(_sample(generator, policies, prompts, 1))
        rounds.add(
            turn,
            {
                **{f"decode_{case}": decode["plain"].wall / decode[case].wall for case in ("one", "four")},
                **{f"cpu_decode_{case}": decode["plain"].cpu / decode[case].cpu for case in ("one", "four")},
                "prefill_one": prefill["plain"].wall / prefill["one"].wall,
                "cpu_prefill_one": prefill["plain"].cpu / prefill["one"].cpu,
                **{f"decode_tokens_per_s_{case}": decoded / taken.wall for case, taken in decode.items()},
                **{f"prefill_tokens_per_s_{case}": read / taken.wall for case, taken in prefill.items()},
            },
        )
    for name in names:
        await running.serving.drop_policy(name)
    return rounds.medians()


async def measure_tasks(running: Sides, size: Size) -> dict[str, float]:
    """Tokens per second of a synchronous loop of each adapter: one at a time, and all adapters' at once."""
    adapters = list((await _adapters(running, "task", NUM_ADAPTERS, size)).items())
    rounds = Rounds("tasks", size.rounds, shown=LIMITS)
    for turn in range(1 + size.rounds):
        rates = dict[int, float]()
        for num_tasks in (1, NUM_ADAPTERS) if turn % 2 else (NUM_ADAPTERS, 1):
            tasks = [_task(running, *adapter, (turn, i), size) for i, adapter in enumerate(adapters[:num_tasks])]
            begin = time.perf_counter()
            rates[num_tasks] = sum(await asyncio.gather(*tasks)) / (time.perf_counter() - begin)
        alone, together = rates[1], rates[NUM_ADAPTERS]
        figures = {"task_tokens_per_s_alone": alone, "task_tokens_per_s_together": together}
        rounds.add(turn, {"eight_adapters": together / alone, **figures})
    return rounds.medians()


PARTS = {"training": measure_training, "generation": measure_generation, "tasks": measure_tasks}


async def _adapters(running: Sides, prefix: str, count: int, size: Size) -> "dict[str, Trainer]":
    """New adapters by name, after one step each, in the generator."""
    adapters: dict[str, Trainer] = {}
    for name in (f"{prefix}-{index}" for index in range(count)):
        adapters[name] = await running.base.adapter(name, LoRAConfig(rank=RANK))
        await adapters[name].forward_backward(_batch(1, 16, size.vocabulary), "cross_entropy")
        await adapters[name].optim_step(ADAM)
        await _sync(adapters[name], running.serving, name)
    return adapters


async def _sync(trainer: "Trainer", generator: "Generator", policy: str | None) -> None:
    await generator.pull_model_state_dict(await trainer.push_model_state_dict(), policy=policy)


async def _task(running: Sides, name: str, trainer: "Trainer", key: tuple[int, int], size: Size) -> int:
    """One step of a loop: sample, learn, push, pull. Returns the tokens that were sampled and trained on."""
    prompts = _prompts(key, max(size.requests // NUM_ADAPTERS, 1), PROMPT_TOKENS, size)
    samples = await _sample(running.serving, [name], prompts, size.new_tokens)
    texts = [np.array([*prompt, *tokens]) for prompt, tokens in zip(prompts, samples, strict=True)]
    batch = [Datum(tokens=text[:-1], loss_inputs={"target_tokens": text[1:]}) for text in texts]
    await trainer.forward_backward(batch, "cross_entropy")
    await trainer.optim_step(ADAM)
    await _sync(trainer, running.serving, name)
    return sum(map(len, texts))


async def _sample(
    generator: "Generator", policies: Sequence[Policy], prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[tuple[int, ...]]:
    """The new tokens of each prompt. The policies take the prompts in turns."""
    sampling = SamplingParams(max_tokens=new_tokens, seed=0, ignore_eos=True)
    calls = [
        generator.generate(prompt, sampling, policy=policies[i % len(policies)]) for i, prompt in enumerate(prompts)
    ]
    return [sample.tokens for (sample,) in await asyncio.gather(*calls)]


def _prompts(key: tuple[int, int], count: int, length: int, size: Size) -> list[list[int]]:
    """Random prompts; those of another key are others."""
    return np.random.default_rng(key).integers(0, size.vocabulary, (count, length)).tolist()


def _batch(sequences: int, length: int, vocabulary: int) -> list[Datum]:
    tokens = np.random.default_rng(0).integers(0, vocabulary, (sequences, length + 1))
    return [Datum(tokens=text[:-1], loss_inputs={"target_tokens": text[1:]}) for text in tokens]


def _peak_bytes(step: OptimStepOutput) -> float:
    """Most memory that the trainer's process held since the step before: in its calls, this step and the push."""
    return max(value for name, value in step.metrics.items() if name.startswith("memory_peak_bytes"))


if __name__ == "__main__":
    main()
