"""How much of the processor's matrix rate `forward_backward` reaches (model FLOP/s utilization, MFU), with SmolLM2.

    python -m benchmarks.mfu [--quick | --smoke] [--repeats N] [--threads N]

2,048 tokens in documents that share nothing, every token scored. Counted are the operations that a step needs
(`ModelFlops`), not what is computed twice. The rate of matrix products is measured in turns with the steps, in the
same dtype, at the model's largest shape.
"""

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_process import become_trainer_process, matrix_rate
from benchmarks.harness import Bar, benchmark_model, machine, parser, print_result
from rl.data.packing import ModelFlops, pack_row
from rl.system.hardware import cpu_dtype
from rl.types import Datum

LIMITS = {(8, 256): 0.60, (4, 512): 0.55, (2, 1024): 0.50}
"""(Documents, tokens of each) -> the least share of the matrix rate, with vector instructions for bfloat16."""
KIND_LIMITS = {"fp32": 0.70, "amx": 0.50}
"""The same on other kinds of CPU: products take a larger part of the time in float32, a smaller with matrix units."""
WARM_UPS = 1


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one repeat")
    options_parser.add_argument("--repeats", type=int, default=3, help=f"measured rounds, after {WARM_UPS} warm-up")
    options_parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = options_parser.parse_args()
    forms = {(2, 32): 0.0, (1, 64): 0.0} if options.smoke else LIMITS
    with benchmark_model(smoke=options.smoke) as model:
        become_trainer_process("benchmarks.mfu", options.threads)
        figures = measure(model, list(forms), 1 if options.quick or options.smoke else options.repeats, options.threads)
    bars = [
        Bar(
            name=f"mfu_{name(form)}",
            value=figures[f"mfu_{name(form)}"],
            limit=KIND_LIMITS.get(machine()["kind"], limit),
            at_most=False,
        )
        for form, limit in forms.items()
    ]
    print_result("mfu", bars, {"dtype": cpu_dtype(), "threads": options.threads, **figures})


def measure(model: Path, forms: list[tuple[int, int]], repeats: int, threads: int) -> dict[str, float]:
    """All figures by name: medians of rounds in which the forms and the plain products take turns."""
    from rl.losses import get_loss
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine

    engine: Any = load_engine(
        TrainerConfig(model=model, num_threads=threads, max_tokens_per_microbatch=2048, compute_dtype=cpu_dtype())
    )
    loss = get_loss("cross_entropy")
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    batches = {form: make_batch(form, config["vocab_size"]) for form in forms}
    seconds: dict[tuple[int, int], list[float]] = {form: [] for form in forms}
    rates: list[float] = []
    for repeat in range(WARM_UPS + repeats):
        for form, batch in batches.items():
            rate = matrix_rate(config["hidden_size"], config["intermediate_size"])
            start = time.perf_counter()
            engine.forward_backward([batch], loss)
            taken = time.perf_counter() - start
            engine.zero_grad()
            if repeat >= WARM_UPS:
                seconds[form].append(taken)
                rates.append(rate)
    peak = statistics.median(rates)
    figures = {"peak_gflops": peak / 1e9}
    flops = ModelFlops.of(model)
    for form, values in seconds.items():
        tokens = form[0] * form[1]
        operations = flops.training(pack_row(batches[form], share_prefixes=False))
        taken = statistics.median(values)
        figures[f"tokens_per_s_{name(form)}"] = tokens / taken
        figures[f"mfu_{name(form)}"] = mfu = operations / taken / peak
        print(f"{name(form):<10}{tokens / taken:8.0f} tokens/s {mfu:8.1%} of {peak / 1e9:.0f} GFLOP/s")
    return figures


def make_batch(form: tuple[int, int], num_tokens: int) -> list[Datum]:
    """Random documents with a target at every position."""
    rng = np.random.default_rng(0)
    sequences = rng.integers(0, num_tokens, (form[0], form[1] + 1))
    weights = np.ones(form[1], dtype=np.float32)
    return [Datum(tokens=s[:-1], loss_inputs={"target_tokens": s[1:], "weights": weights}) for s in sequences]


def name(form: tuple[int, int]) -> str:
    """The form as the names of figures have it."""
    return f"{form[0]}x{form[1]}"


if __name__ == "__main__":
    main()
