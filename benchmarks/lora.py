"""What an adapter costs beside the whole model, and what many adapters cost beside one: SmolLM2, ranks of 32.

    python -m benchmarks.lora [--quick | --smoke] [--rounds N] [--threads N]

Two trainers, one of the whole model and one of adapters over it, and two generators, one without adapters, live in
processes of their own and take turns; figures are medians of the rounds. Both sides compute in the dtype that the CPU
is fast in. Bars, each a ratio to the whole model or to the generator without adapters:

* `train_speed`: forward_backward's tokens per second. `optim_time_ratio`: optim_step's time.
* `memory_ratio`: the trainer's peak memory. `sync_ratio`: the time of a push and a pull.
* `decode_one`, `decode_four`, `prefill_one`: a generator's tokens per second with requests of one or four adapters.
* `eight_adapters`: tokens per second, sampled and trained, of eight adapters that eight tasks train at once, to one's.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.hardware import cpu_dtype
from rl.lora import LoRAConfig, Policy
from rl.types import AdamParams, Datum, SamplingParams

if TYPE_CHECKING:  # they load torch, Monarch and vLLM
    from controller.meshes.trainer_handle import TrainerHandle
    from rl.protocols import Generator, Trainer

RANK = 32
NUM_ADAPTERS = 8
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
Times = defaultdict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Size:
    """How much work there is."""

    requests: int
    """Requests that are decoded together, and prompts of a prefill."""
    new_tokens: int
    prefill_tokens: int
    sequences: int
    """Of a training batch."""
    train_tokens: int
    """Of each sequence."""
    rounds: int


@dataclass(frozen=True, slots=True)
class Sides:
    """Everything that runs."""

    whole: "TrainerHandle"
    base: "TrainerHandle"
    adapters: "list[Trainer]"
    plain: "Generator"
    serving: "Generator"


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="2 rounds of shorter texts")
    options_parser.add_argument("--rounds", type=int, default=5, help="rounds measured, after a warm-up round")
    options_parser.add_argument("--threads", type=int, default=1, help="of each process")
    options = options_parser.parse_args()
    if options.smoke:
        size = Size(requests=2, new_tokens=4, prefill_tokens=16, sequences=2, train_tokens=16, rounds=1)
    elif options.quick:
        size = Size(requests=16, new_tokens=16, prefill_tokens=64, sequences=4, train_tokens=128, rounds=2)
    else:
        size = Size(
            requests=32, new_tokens=64, prefill_tokens=128, sequences=4, train_tokens=256, rounds=options.rounds
        )
    with benchmark_model(smoke=options.smoke) as model:
        figures = asyncio.run(measure(model, options, size))
    bars = [Bar(name=name, value=figures[name], limit=limit, at_most=most) for name, (limit, most) in LIMITS.items()]
    for bar in bars:
        print(f"{bar.name:<18}{bar.value:8.3f}")
    print_result("lora", bars, {**figures, "rank": RANK, "threads": options.threads, "dtype": cpu_dtype()})


async def measure(model: Path, options: argparse.Namespace, size: Size) -> dict[str, float]:
    """All figures by name."""
    figures: dict[str, float] = {}
    async with sides(model, options.threads, size) as running:
        figures |= await measure_training(running, size, vocab_size(model))
        figures |= await measure_generation(running, size, vocab_size(model))
        figures |= await measure_tasks(running, size, vocab_size(model))
    return figures


@asynccontextmanager
async def sides(model: Path, threads: int, size: Size) -> AsyncGenerator[Sides]:
    """Both trainers and both generators, with weights pulled."""
    # Here, because a module that imports Monarch also configures it, for this process and its children.
    from controller.meshes.adapters import BoundGenerator
    from controller.meshes.launch import Launcher
    from controller.meshes.trainer_handle import TrainerHandle
    from controller.meshes.trainer_mesh import TrainerMesh
    from generator.config import GeneratorConfig, LoRALimits
    from trainer.config import TrainerConfig

    lora, dtype = LoRAConfig(rank=RANK), cpu_dtype()
    training = TrainerConfig(compute_dtype=dtype, num_threads=threads, max_tokens_per_microbatch=2048)
    serving = GeneratorConfig(dtype=dtype, num_threads=threads, max_model_len=256, max_num_seqs=max(size.requests, 8))
    room = replace(serving, lora=LoRALimits(max_rank=RANK, max_adapters=4))
    with tempfile.TemporaryDirectory() as folder:
        async with Launcher(logs := Path(folder)) as launcher:
            policy, base, bound, plain = await asyncio.gather(
                launcher.trainer(model, replace(training, lora=lora), generator=room),
                launcher.reference(model, replace(training, lora=lora)),
                launcher.generator(model, room),
                launcher.generator(model, serving, name="plain"),
            )
            # A launcher has one trainer that pushes. This one's versions are the model's, the other's are adapters'.
            records = launcher._version_records  # pyright: ignore[reportPrivateUsage]
            training = replace(training, model=model)
            mesh = await TrainerMesh.launch(training, dtype, logs, name="whole", version_records=records)
            assert isinstance(base, TrainerHandle)
            assert isinstance(bound, BoundGenerator)
            try:
                yield Sides(TrainerHandle(mesh), base, [policy], plain, bound.unbound)
            finally:
                await mesh.mesh.stop()


async def measure_training(running: Sides, size: Size, vocabulary: int) -> dict[str, float]:
    """Speed, memory and weight updates of the trainers."""
    batch, num_tokens = _batch(size, vocabulary), size.sequences * size.train_tokens
    trainers: dict[str, tuple[Trainer, Generator, str | None]] = {
        "whole": (running.whole, running.plain, None),
        "adapter": (running.adapters[0], running.serving, "policy"),
    }
    seconds: dict[str, Times] = {name: defaultdict(list) for name in trainers}
    for turn in range(1 + size.rounds):
        for name in trainers if turn % 2 else reversed(trainers):
            trainer, generator, policy = trainers[name]
            clock = seconds[name] if turn else defaultdict(list)
            begin = time.perf_counter()
            await trainer.forward_backward(batch, "cross_entropy")
            begin = _lap(clock, "forward_backward", begin)
            await trainer.optim_step(ADAM)
            begin = _lap(clock, "optim_step", begin)
            version = await trainer.push_model_state_dict()
            await generator.pull_model_state_dict(version, policy=policy)
            _lap(clock, "sync", begin)
    median = {name: {part: statistics.median(values) for part, values in of.items()} for name, of in seconds.items()}
    whole, adapter = median["whole"], median["adapter"]
    peaks = {"whole": _peak_bytes(running.whole), "adapter": _peak_bytes(running.base)}
    return {
        "train_speed": whole["forward_backward"] / adapter["forward_backward"],
        "optim_time_ratio": adapter["optim_step"] / whole["optim_step"],
        "memory_ratio": peaks["adapter"] / peaks["whole"],
        "sync_ratio": adapter["sync"] / whole["sync"],
        **{f"train_tokens_per_s_{name}": num_tokens / of["forward_backward"] for name, of in median.items()},
        **{f"ms_optim_step_{name}": 1e3 * of["optim_step"] for name, of in median.items()},
        **{f"ms_sync_{name}": 1e3 * of["sync"] for name, of in median.items()},
        **{f"peak_memory_gb_{name}": peak / 1e9 for name, peak in peaks.items()},
    }


async def measure_generation(running: Sides, size: Size, vocabulary: int) -> dict[str, float]:
    """Tokens per second of the generators."""
    names = [f"adapter-{index}" for index in range(NUM_ADAPTERS)]
    for name in names:
        trainer = await running.base.adapter(name, LoRAConfig(rank=RANK))
        await trainer.forward_backward(_batch(size, vocabulary)[:1], "cross_entropy")
        await trainer.optim_step(ADAM)
        await running.serving.pull_model_state_dict(await trainer.push_model_state_dict(), policy=name)
        running.adapters.append(trainer)
    cases: dict[str, tuple[Generator, Sequence[Policy]]] = {
        "plain": (running.plain, [None]),
        "one": (running.serving, names[:1]),
        "four": (running.serving, names[:4]),
    }
    rates: Times = defaultdict(list)
    for turn in range(1 + size.rounds):
        for case in cases if turn % 2 else reversed(cases):
            generator, policies = cases[case]
            decode = await _rate(generator, policies, size, vocabulary, turn, size.new_tokens)
            prefill = await _rate(generator, policies, size, vocabulary, turn, 1)
            if turn:
                rates[f"decode_{case}"].append(decode)
                rates[f"prefill_{case}"].append(prefill)
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "decode_one": median["decode_one"] / median["decode_plain"],
        "decode_four": median["decode_four"] / median["decode_plain"],
        "prefill_one": median["prefill_one"] / median["prefill_plain"],
        **{f"tokens_per_s_{name}": rate for name, rate in median.items()},
    }


async def _rate(
    generator: "Generator", policies: Sequence[Policy], size: Size, vocabulary: int, turn: int, new_tokens: int
) -> float:
    """New tokens per second; with one new token each, which is a prefill, tokens of the prompts per second."""
    length = size.prefill_tokens if new_tokens == 1 else 16
    rng = np.random.default_rng((turn, new_tokens, len(policies)))  # no prompt comes twice
    prompts = rng.integers(0, vocabulary, (size.requests, length)).tolist()
    sampling = SamplingParams(max_tokens=new_tokens, seed=turn, ignore_eos=True)
    begin = time.perf_counter()
    calls = [
        generator.generate(prompt, sampling, policy=policies[i % len(policies)]) for i, prompt in enumerate(prompts)
    ]
    samples = await asyncio.gather(*calls)
    num_tokens = len(samples) * length if new_tokens == 1 else sum(len(s.tokens) for (s,) in samples)
    return num_tokens / (time.perf_counter() - begin)


async def measure_tasks(running: Sides, size: Size, vocabulary: int) -> dict[str, float]:
    """Tokens per second of a synchronous loop of each adapter: one at a time, and all adapters' at once."""
    rates: Times = defaultdict(list)
    adapters = list(enumerate(running.adapters[1:]))
    for turn in range(1 + size.rounds):
        for num_tasks in (1, NUM_ADAPTERS) if turn % 2 else (NUM_ADAPTERS, 1):
            begin = time.perf_counter()
            tasks = [_task(running, index, trainer, size, vocabulary, turn) for index, trainer in adapters[:num_tasks]]
            num_tokens = sum(await asyncio.gather(*tasks))
            if turn:
                rates["alone" if num_tasks == 1 else "together"].append(num_tokens / (time.perf_counter() - begin))
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "eight_adapters": median["together"] / median["alone"],
        **{f"task_tokens_per_s_{name}": rate for name, rate in median.items()},
    }


async def _task(running: Sides, index: int, trainer: "Trainer", size: Size, vocabulary: int, turn: int) -> int:
    """One step of a loop: sample, learn, push, pull. Returns the tokens that were sampled and trained on."""
    rng = np.random.default_rng((turn, index, 7))
    prompts = rng.integers(0, vocabulary, (max(size.requests // NUM_ADAPTERS, 1), 16)).tolist()
    sampling, policy = SamplingParams(max_tokens=size.new_tokens, seed=turn, ignore_eos=True), f"adapter-{index}"
    samples = await asyncio.gather(*(running.serving.generate(p, sampling, policy=policy) for p in prompts))
    texts = [np.array([*prompt, *sample.tokens]) for prompt, (sample,) in zip(prompts, samples, strict=True)]
    batch = [Datum(tokens=text[:-1], loss_inputs={"target_tokens": text[1:]}) for text in texts]
    await trainer.forward_backward(batch, "cross_entropy")
    await trainer.optim_step(ADAM)
    await running.serving.pull_model_state_dict(await trainer.push_model_state_dict(), policy=policy)
    return sum(map(len, texts))


def _batch(size: Size, vocabulary: int) -> list[Datum]:
    tokens = np.random.default_rng(0).integers(0, vocabulary, (size.sequences, size.train_tokens + 1))
    return [Datum(tokens=text[:-1], loss_inputs={"target_tokens": text[1:]}) for text in tokens]


def _lap(clock: Times, part: str, begin: float) -> float:
    now = time.perf_counter()
    clock[part].append(now - begin)
    return now


def _peak_bytes(trainer: "TrainerHandle") -> int:
    """Peak memory of a trainer's only process since it began."""
    (pid,) = trainer.mesh.pids
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
