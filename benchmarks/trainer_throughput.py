"""Tokens per second of forward_backward + optim_step for SmolLM2, side by side with loops around a transformers model.

    python -m benchmarks.trainer_throughput [--quick | --smoke] [--repeats N] [--threads N]

A GRPO batch of mixed lengths: groups of completions that share their prompt. The engine and one rival at a time live
in processes of their own with the same threads; they take turns, and medians are compared. The comparison is repeated
with prompts that all differ, where sharing a prefix gains nothing. The engine `megatron` is shown too, without a bar,
where the package is installed.

`engine_overhead` is the time of the engine's `forward_backward` over that of the bare model's forward and backward pass
on the same rows. `actor_overhead` is the fraction of a `forward_backward` call through the handle of a real
`PolicyTrainer` process that is spent outside of the engine: on checks, planning, serialisation and dispatch. Everything
computes in the dtype that the CPU is fast in.
"""

import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, benchmark_model, parser, print_result, vocab_size
from rl.system.hardware import cpu_dtype
from rl.types import AdamParams, Datum

MAX_TOKENS = 2048
WARM_UPS = 2
"""Steps that are not counted; they fault in the memory that later ones reuse."""
LOOPS = ("padded", "packed")
"""Loops around a transformers model."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured, and how often."""

    vocab_size: int
    group_size: int
    longest: int
    """Tokens of the longest sequence, or a little more."""
    repeats: int


def make_batch(size: Size, *, shared: bool) -> list[Datum]:
    """Two groups with prompts of 16 to longest/4 tokens, in sequences of 32 to `longest` tokens.

    Unless `shared`, all sequences differ in their first token.
    """
    rng = np.random.default_rng(0)
    batch: list[Datum] = []
    for _ in range(2):
        prompt = rng.integers(0, size.vocab_size, rng.integers(16, size.longest // 4))
        for _ in range(size.group_size):
            length = int(rng.integers(max(32, len(prompt) + 4), size.longest))
            tokens = np.concatenate([prompt, rng.integers(0, size.vocab_size, length - len(prompt) + 1)])
            if not shared:
                tokens[0] = len(batch)
            scored = np.arange(length) >= len(prompt) - 1
            inputs = {
                "target_tokens": tokens[1:],
                "weights": scored.astype(np.float32),
                "logprobs": np.where(scored, -10.0, 0.0).astype(np.float32),
                "advantages": (scored * rng.normal()).astype(np.float32),
            }
            batch.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
    return batch


def make_contender(name: str, model: Path, threads: int) -> Callable[[Sequence[Datum]], Any]:
    """A function that does one step over a batch in this process."""
    if name in LOOPS:
        from benchmarks.reference_trainers import ReferenceTrainer

        return ReferenceTrainer(model, cpu_dtype(), packed=name == "packed", max_tokens=MAX_TOKENS).step
    from rl.data.batching import plan_batch
    from rl.losses import get_loss
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine

    config = TrainerConfig(
        model=model,
        engine="megatron" if name == "megatron" else "torchtitan",
        num_threads=threads,
        max_tokens_per_microbatch=MAX_TOKENS,
        compute_dtype=cpu_dtype(),
    )
    params = AdamParams(learning_rate=1e-6, grad_clip_norm=1.0)
    loss = get_loss("importance_sampling")
    if name == "actor":
        return _actor_step(config, params)
    engine: Any = load_engine(config)

    def microbatches(batch: Sequence[Datum]) -> list[list[Datum]]:
        plan = plan_batch(
            batch, num_ranks=1, max_tokens_per_microbatch=MAX_TOKENS, share_prefixes=engine.shares_prefixes
        )
        return plan.split(batch)[0]

    def engine_step(batch: Sequence[Datum]) -> float:
        """Returns the seconds of forward_backward alone."""
        start = time.perf_counter()
        engine.forward_backward(microbatches(batch), loss)
        seconds = time.perf_counter() - start
        engine.optim_step(params)
        return seconds

    def bare_step(batch: Sequence[Datum]) -> float:
        """The model's own forward and backward pass on the engine's rows, with the sum of log-probs as the loss."""
        rows = engine._packed(microbatches(batch))
        start = time.perf_counter()
        for row in rows:
            engine._rows._score(row, entropy=False)[0].sum().backward()
        seconds = time.perf_counter() - start
        engine.optim_step(params)
        return seconds

    return bare_step if name == "bare_model" else engine_step


def _actor_step(config: Any, params: AdamParams) -> Callable[[Sequence[Datum]], float]:
    """The same step through a `TrainerHandle`, in a trainer process of its own.

    Returns the fraction of forward_backward's time that was spent outside of the engine.
    """
    from controller.handles.trainer_handle import TrainerHandle

    loop = asyncio.new_event_loop()
    logs = Path(tempfile.mkdtemp(prefix="ownloop-benchmark-"))
    handle = loop.run_until_complete(TrainerHandle.launch(config, "bfloat16", logs))

    async def step(batch: Sequence[Datum]) -> float:
        start = time.perf_counter()
        output = await handle.forward_backward(batch, "importance_sampling")
        seconds = time.perf_counter() - start
        await handle.optim_step(params)
        return 1 - output.metrics["seconds_engine_max"] / seconds

    return lambda batch: loop.run_until_complete(step(batch))


def _serve(name: str, model: Path, threads: int, pipe: "Connection[Any, Any]") -> None:
    """A contender's process: receives batches; sends seconds, the step's result and peak memory in bytes."""
    step = make_contender(name, model, threads)
    pipe.send("ready")
    while (batch := pipe.recv()) is not None:
        start = time.perf_counter()
        result = step(batch)
        seconds = time.perf_counter() - start
        # The peak since the process began is that of its steps, because `trainer_env` keeps freed memory.
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        pipe.send((seconds, result, peak))


class Contenders:
    """The contenders' processes. One computes at a time."""

    def __init__(self, names: Sequence[str], model: Path, threads: int) -> None:
        """Starts the processes and waits until all have loaded the model."""
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection[Any, Any]] = {}
        self._processes: list[Any] = []
        for name in names:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, model, threads, theirs))
            process.start()
            self._pipes[name] = ours
            self._processes.append(process)
            ours.recv()

    def step(self, name: str, batch: Sequence[Datum]) -> tuple[float, Any, int]:
        """Seconds, the step's result, and peak memory in bytes so far."""
        self._pipes[name].send(batch)
        return self._pipes[name].recv()

    def stop(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="short sequences, one repeat")
    options_parser.add_argument(
        "--repeats", type=int, default=3, help=f"measured steps, after {WARM_UPS} warm-up steps"
    )
    options_parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = options_parser.parse_args()
    with benchmark_model(smoke=options.smoke) as model:
        group_size, longest, repeats = (2, 96, 1) if options.smoke else (8, 512, options.repeats)
        if options.quick:
            longest, repeats = 128, 1
        figures = measure(model, Size(vocab_size(model), group_size, longest, repeats), options.threads)
    print_result(
        "trainer_throughput",
        [
            Bar(name="speedup_over_padded", value=figures["speedup_over_padded"], limit=1.5, at_most=False),
            Bar(name="speedup_over_packed", value=figures["speedup_over_packed"], limit=1.0, at_most=False),
            Bar(name="engine_overhead", value=figures["engine_overhead"], limit=1.10),
            Bar(name="actor_overhead", value=figures["actor_overhead"], limit=0.05),
        ],
        figures,
    )


def measure(model: Path, size: Size, threads: int) -> dict[str, float]:
    """All figures by name."""
    from trainer.config import TrainerConfig, trainer_env

    os.environ |= trainer_env(TrainerConfig(num_threads=threads))  # the same for all contenders
    figures: dict[str, float] = {"threads": threads}
    megatron = ("megatron",) if importlib.util.find_spec("megatron") is not None else ()
    for rival in (*megatron, *LOOPS, "bare_model"):
        contenders = Contenders(("engine", rival), model, threads)
        try:
            figures |= compare(contenders, rival, size)
        finally:
            contenders.stop()
    contenders = Contenders(("actor",), model, threads)
    try:
        batch = make_batch(size, shared=True)
        outside = [contenders.step("actor", batch)[1] for _ in range(WARM_UPS + size.repeats)][WARM_UPS:]
        figures["actor_overhead"] = statistics.median(outside)
    finally:
        contenders.stop()
    return figures


def compare(contenders: Contenders, rival: str, size: Size) -> dict[str, float]:
    """The figures of the engine and one rival. Ratios are of the medians of steps that took turns."""
    figures: dict[str, float] = {}
    for shared in (True,) if rival == "bare_model" else (True, False):
        batch = make_batch(size, shared=shared)
        num_tokens = sum(len(datum.tokens) for datum in batch)
        suffix = "" if shared else "_distinct_prompts"
        seconds: dict[str, list[float]] = {"engine": [], rival: []}
        inside: dict[str, list[float]] = {"engine": [], rival: []}
        for repeat in range(WARM_UPS + size.repeats):
            for name in ("engine", rival):
                taken, result, peak = contenders.step(name, batch)
                figures[f"peak_memory_gb_{name}"] = peak / 1e9
                if repeat >= WARM_UPS:
                    seconds[name].append(taken)
                    inside[name].append(result)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{rival + suffix:<28}" + "".join(f"{n} {num_tokens / t:6.0f} tokens/s   " for n, t in median.items()))
        if rival != "bare_model":
            figures |= {f"tokens_per_s_{name}{suffix}": num_tokens / taken for name, taken in median.items()}
            figures[f"speedup_over_{rival}{suffix}"] = median[rival] / median["engine"]
        else:
            figures["engine_overhead"] = statistics.median(inside["engine"]) / statistics.median(inside[rival])
        figures[f"tokens_per_step{suffix}"] = num_tokens
    return figures


if __name__ == "__main__":
    main()
