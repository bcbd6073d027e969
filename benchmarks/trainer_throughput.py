"""Tokens per second of forward_backward + optim_step for SmolLM2, side by side with loops around a transformers model.

    python -m benchmarks.trainer_throughput [--quick] [--repeats N] [--threads N]

A GRPO batch of mixed lengths: groups of completions that share their prompt. The engine and one rival at a time live
in processes of their own with the same threads; they take turns, and medians are compared. The same is repeated with
prompts that all differ, where a shared prefix gains nothing. `actor_overhead` is the share of a `forward_backward`
through the handle of a real `PolicyTrainer` process that passes outside of its engine (checks, planning, serialisation,
dispatch), `engine_overhead` what the engine adds to the bare model's forward and backward pass on its rows. Everything
computes in the dtype that the processor is fast in.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, print_result
from rl.hardware import cpu_dtype
from rl.types import AdamParams, Datum

MAX_TOKENS = 2048
WARM_UPS = 2  # the first steps fault in the memory that later ones reuse
RIVALS = ("padded", "packed", "bare_model")


def make_batch(num_groups: int, group_size: int, longest: int, *, shared: bool, vocab_size: int = 49152) -> list[Datum]:
    """Groups with prompts of 16 to longest/4 tokens, in sequences of 32 to `longest`.

    With `shared` off no two sequences begin alike.
    """
    rng = np.random.default_rng(0)
    batch: list[Datum] = []
    for _ in range(num_groups):
        prompt = rng.integers(0, vocab_size, rng.integers(16, longest // 4))
        for _ in range(group_size):
            length = int(rng.integers(max(32, len(prompt) + 4), longest))
            tokens = np.concatenate([prompt, rng.integers(0, vocab_size, length - len(prompt) + 1)])
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
    """The function that does one step over a batch, and whatever it needs, in this process."""
    if name in ("padded", "packed"):
        from benchmarks.reference_trainers import ReferenceTrainer

        return ReferenceTrainer(model, cpu_dtype(), packed=name == "packed", max_tokens=MAX_TOKENS).step
    from rl.data.batching import plan_batch
    from rl.losses import get_loss
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine

    config = TrainerConfig(
        model=model, num_threads=threads, max_tokens_per_microbatch=MAX_TOKENS, compute_dtype=cpu_dtype()
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
        """The model's own forward and backward pass on the engine's rows, with the simplest loss there is."""
        rows = [engine._pack(microbatch) for microbatch in microbatches(batch)]
        start = time.perf_counter()
        for row in rows:
            engine._score(row, entropy=False)[0].sum().backward()
        seconds = time.perf_counter() - start
        engine.optim_step(params)
        return seconds

    return engine_step if name == "engine" else bare_step


def _actor_step(config: Any, params: AdamParams) -> Callable[[Sequence[Datum]], float]:
    """The same step through a `TrainerHandle`, in a trainer process of its own.

    Returns the share of forward_backward's time that passed outside of the engine.
    """
    from controller.meshes.trainer_handle import TrainerHandle

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
    """A contender's process: batches in; seconds, what the step returned and peak memory out."""
    step = make_contender(name, model, threads)
    pipe.send("ready")
    while (batch := pipe.recv()) is not None:
        start = time.perf_counter()
        result = step(batch)
        seconds = time.perf_counter() - start
        # The engine measures each phase anew, but under `trainer_env` no process hands memory back in between.
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        pipe.send((seconds, result, peak))


class Contenders:
    """Their processes. One computes at a time."""

    def __init__(self, names: Sequence[str], model: Path, threads: int) -> None:
        """Starts them and waits until all are ready."""
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
        """Seconds, what the step returned, and peak memory in bytes so far."""
        self._pipes[name].send(batch)
        return self._pipes[name].recv()

    def stop(self) -> None:
        """Ends them."""
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            process.kill()


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help=f"measured steps of each, after {WARM_UPS} that are not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="short sequences, one repeat")
    options = parser.parse_args()
    longest, repeats = (128, 1) if options.quick else (512, options.repeats)

    from controller.runs.models import resolve_model
    from trainer.actor import trainer_env
    from trainer.config import TrainerConfig

    model = resolve_model("smollm2-135m-instruct")
    os.environ |= trainer_env(TrainerConfig(num_threads=options.threads))  # the same for all of them
    figures: dict[str, float] = {"threads": options.threads}
    for rival in RIVALS:
        contenders = Contenders(("engine", rival), model, options.threads)
        try:
            figures |= compare(contenders, rival, longest, repeats)
        finally:
            contenders.stop()
    contenders = Contenders(("actor",), model, options.threads)
    try:
        batch = make_batch(2, 8, longest, shared=True)
        outside = [contenders.step("actor", batch)[1] for _ in range(WARM_UPS + repeats)][WARM_UPS:]
        figures["actor_overhead"] = statistics.median(outside)
    finally:
        contenders.stop()
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


def compare(contenders: Contenders, rival: str, longest: int, repeats: int) -> dict[str, float]:
    """What one pair gives. Ratios are of medians of steps that took turns."""
    figures: dict[str, float] = {}
    for shared in (True, False) if rival in ("padded", "packed") else (True,):
        batch = make_batch(2, 8, longest, shared=shared)
        num_tokens = sum(len(datum.tokens) for datum in batch)
        suffix = "" if shared else "_distinct_prompts"
        seconds: dict[str, list[float]] = {"engine": [], rival: []}
        inside: dict[str, list[float]] = {"engine": [], rival: []}
        for repeat in range(WARM_UPS + repeats):
            for name in ("engine", rival):
                taken, result, peak = contenders.step(name, batch)
                figures[f"peak_memory_gb_{name}"] = peak / 1e9
                if repeat >= WARM_UPS:
                    seconds[name].append(taken)
                    inside[name].append(result)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        print(f"{rival + suffix:<24}" + "".join(f"{n} {num_tokens / t:6.0f} tokens/s   " for n, t in median.items()))
        if rival in ("padded", "packed"):
            figures |= {f"tokens_per_s_{name}{suffix}": num_tokens / taken for name, taken in median.items()}
            figures[f"speedup_over_{rival}{suffix}"] = median[rival] / median["engine"]
        else:
            figures["engine_overhead"] = statistics.median(inside["engine"]) / statistics.median(inside[rival])
        figures[f"tokens_per_step{suffix}"] = num_tokens
    return figures


if __name__ == "__main__":
    main()
