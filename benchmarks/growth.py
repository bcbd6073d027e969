"""How time and memory of `forward_backward` grow, and how far each point is from what the processor could do.

    python -m benchmarks.growth [--quick | --smoke] [--repeats N] [--threads N]

A random Llama of SmolLM2's shape with six layers, every token scored; one thing grows at a time: the tokens of a batch,
the tokens of a document, the answers to a prompt, the model's width. Beside each point is its limit: the operations
that it needs (`ModelFlops`) over the measured rate of matrix products, or the bytes of weights and gradients over
the measured rate of a copy, whichever takes longer. Bars: time per operation grows by at most a fifth from the smallest
batch of tokens to 16 times as many, and no point is below half of its limit except those that `EXCEPTIONS` explains.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_process import become_trainer_process
from benchmarks.harness import Bar, parser, print_result
from rl.data.packing import ModelFlops, pack_row
from rl.system.hardware import cpu_dtype
from rl.types import Datum

SHAPE: Mapping[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_kv_heads": 3,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
SMOKE: Mapping[str, Any] = {**SHAPE, "vocab_size": 512, "num_hidden_layers": 1}
EXCEPTIONS: Mapping[str, str] = {
    "width 0.5x": "the softmax over 49,152 words is not in the limit, and weighs most where a model is narrowest",
}
"""Why a point, or a curve, may be below half of its limit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts with answers; without answers, documents of the prompts' length."""

    num_prompts: int
    prompt: int
    num_answers: int = 0
    answer: int = 0

    def datums(self, vocab_size: int) -> list[Datum]:
        """Random tokens. Every token of a document counts, and of a prompt with answers only these."""
        rng = np.random.default_rng(0)
        datums: list[Datum] = []
        for _ in range(self.num_prompts):
            prompt = rng.integers(0, vocab_size, self.prompt)
            for _ in range(max(1, self.num_answers)):
                tokens = np.concatenate([prompt, rng.integers(0, vocab_size, self.answer + 1)])
                weights = np.ones(len(tokens) - 1, dtype=np.float32)
                weights[: self.prompt - 1 if self.num_answers else 0] = 0.0
                inputs = {"target_tokens": tokens[1:], "weights": weights}
                datums.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
        return datums


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured of one batch."""

    seconds: float
    limit: float
    """Seconds that the operations, or the bytes, take at the measured rates."""
    flops: float
    memory_bytes: float

    @property
    def share(self) -> float:
        """The part of the limit that was reached; 1 is as fast as can be."""
        return self.limit / self.seconds


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="one repeat of the smallest two points of each curve")
    options_parser.add_argument("--repeats", type=int, default=3, help="measured rounds, after one that warms up")
    options_parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = options_parser.parse_args()
    become_trainer_process("benchmarks.growth", options.threads)
    short = options.quick or options.smoke
    points: dict[str, Point] = {}
    for curve, batches in curves(short=short, tokens=32 if options.smoke else 512).items():
        points |= measure(curve, batches, SMOKE if options.smoke else SHAPE, 1 if short else options.repeats)
    tokens = [point.seconds / point.flops for name, point in points.items() if name.startswith("tokens ")]
    below = [name for name, point in points.items() if point.share < 0.5 and not excused(name)]
    bars = [
        Bar(name="growth_per_operation", value=tokens[-1] / tokens[0], limit=1.2),
        Bar(name="points_below_half", value=len(below), limit=0),
    ]
    figures = {f"seconds {name}": point.seconds for name, point in points.items()}
    figures |= {f"share {name}": point.share for name, point in points.items()}
    figures |= {f"gigabytes {name}": point.memory_bytes / 1e9 for name, point in points.items()}
    print_result("growth", bars, {"dtype": cpu_dtype(), "threads": options.threads, **figures})


def excused(name: str) -> bool:
    """Whether `EXCEPTIONS` says why the point may be slow."""
    return any(name.startswith(each) for each in EXCEPTIONS)


def curves(*, short: bool, tokens: int) -> dict[str, dict[str, tuple[float, Batch]]]:
    """By the name of the curve, (width, batch) of each point by its name. `tokens` are those of most batches."""
    length = min(tokens, 256)
    found = {
        "tokens": {f"{n}x": (1.0, Batch(n * tokens // length, length)) for n in (1, 2, 4, 8, 16)},
        "document": {
            f"{length} tokens": (1.0, Batch(max(1, 4 * tokens // length), length))
            for length in (64, 128, 256, 512, 1024, 2048, 4096)
        },
        "answers": {f"{n}": (1.0, Batch(4, length, n, 32)) for n in (1, 4, 16, 64)},
        "width": {f"{width:g}x": (width, Batch(tokens // length, length)) for width in (0.5, 1.0, 2.0, 4.0)},
    }
    return {name: dict(list(points.items())[: 2 if short else None]) for name, points in found.items()}


def measure(
    curve: str, batches: Mapping[str, tuple[float, Batch]], shape: Mapping[str, Any], repeats: int
) -> dict[str, Point]:
    """The points of one curve, in rounds in which they take turns."""
    by_width: dict[float, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for width in {width for width, _ in batches.values()}:
            by_width[width] = load(Path(folder) / f"{width:g}", shape, width)
        datums = {name: batch.datums(shape["vocab_size"]) for name, (_, batch) in batches.items()}
        for repeat in range(1 + repeats):
            for name, (width, _) in batches.items():
                start = time.perf_counter()
                output = by_width[width].step(datums[name])
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
                memory[name] = output.metrics["memory_peak_bytes_max"]
        points: dict[str, Point] = {}
        for name, (width, _) in batches.items():
            flops, limit = by_width[width].needs(datums[name])
            taken = statistics.median(seconds[name])
            points[f"{curve} {name}"] = point = Point(taken, limit, flops, memory[name])
            print(
                f"{curve + ' ' + name:<22}{taken:8.2f} s {point.share:7.0%} of the limit {memory[name] / 1e9:6.2f} GB"
                f"{'  ' + why if (why := reason(f'{curve} {name}', point)) else ''}",
                flush=True,
            )
    return points


def reason(name: str, point: Point) -> str:
    """The sentence that says why a point is below half of its limit."""
    return next((why for key, why in EXCEPTIONS.items() if name.startswith(key)), "") if point.share < 0.5 else ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine, and the rates of its products and of a copy."""

    engine: Any
    flops: ModelFlops
    rate: float
    bytes_per_s: float
    num_bytes: float
    """Weights, read forwards and backwards, and gradients, read and written."""

    def step(self, datums: Sequence[Datum]) -> Any:
        """One forward and backward pass over a row."""
        from rl.losses import get_loss

        output = self.engine.forward_backward([datums], get_loss("cross_entropy"))
        self.engine.zero_grad()
        return output

    def needs(self, datums: Sequence[Datum]) -> tuple[float, float]:
        """Operations of a step, and the seconds that it takes at the measured rates."""
        flops = self.flops.training(pack_row(datums, share_prefixes=self.engine.shares_prefixes))
        return flops, max(flops / self.rate, self.num_bytes / self.bytes_per_s)


def load(folder: Path, shape: Mapping[str, Any], width: float) -> Loaded:
    """Makes a model of `width` times the shape's, and its engine."""
    import torch

    from benchmarks.engine_process import matrix_rate
    from rl.tiny_models import tiny_llama
    from trainer.config import TrainerConfig
    from trainer.engines import load_engine

    # The number of heads grows with the width, not their size.
    heads = max(1, round(shape["num_kv_heads"] * width))
    hidden = round(shape["hidden_size"] * width)
    head_size = shape["hidden_size"] // shape["num_attention_heads"]
    wide: dict[str, Any] = {
        **shape,
        "hidden_size": hidden,
        "intermediate_size": round(shape["intermediate_size"] * width),
        "num_kv_heads": heads,
        "num_attention_heads": heads * shape["num_attention_heads"] // shape["num_kv_heads"],
        "head_dim": head_size,
    }
    model = tiny_llama(folder, **wide)
    engine: Any = load_engine(TrainerConfig(model=model, max_tokens_per_microbatch=1 << 16, compute_dtype=cpu_dtype()))
    num_parameters = sum(parameter.numel() for _, parameter in engine.hf_parameters())
    dtype: torch.dtype = getattr(torch, cpu_dtype())
    return Loaded(
        engine=engine,
        flops=ModelFlops.of(model),
        rate=matrix_rate(hidden, wide["intermediate_size"]),
        bytes_per_s=copy_rate(),
        num_bytes=num_parameters * (2.0 * dtype.itemsize + 2 * 4),
    )


def copy_rate() -> float:
    """Bytes a second that a copy reads and writes, the best of five."""
    import torch

    source = torch.ones(1 << 26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), 5)


def fastest(work: Callable[[], object], repeats: int) -> float:
    """Seconds that the work takes at best."""
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    main()
