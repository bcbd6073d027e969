"""Model FLOPs utilisation of a step, and the same step in a transformers loop, side by side.

    python -m benchmarks.gpu.utilisation [--smoke] [--compile | --no-compile]

A model of Qwen3-1.7B's shape with random weights, 16,384 tokens in documents of equal length, so that a padded loop
wastes nothing. `mfu` counts 6 operations per weight of a matrix product and token, and attention's products over half
of the square, over the peak of a bfloat16 product measured here. Recomputation does not count.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import Bar, parser, print_result
from rl.losses import get_loss
from rl.tiny_models import tiny_qwen3
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine

SHAPE: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
SMALL: Mapping[str, Any] = {**SHAPE, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class Size:
    """A batch of equally long documents."""

    num_documents: int
    length: int

    @property
    def num_tokens(self) -> int:
        """All tokens of a step."""
        return self.num_documents * self.length


def operations(shape: Mapping[str, Any], size: Size) -> float:
    """Operations of a step's matrix products: two per weight and token, three times for forward and backward."""
    d, heads, kv_heads, head = (
        shape[name] for name in ("hidden_size", "num_attention_heads", "num_kv_heads", "head_dim")
    )
    attention = d * head * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * d * shape["intermediate_size"]
    weights = shape["num_hidden_layers"] * layer + d * shape["vocab_size"]
    # Queries times keys and weights times values, each over half of the square of a document.
    scores = shape["num_hidden_layers"] * 2 * 2 * heads * head * size.num_documents * size.length**2 / 2
    return 3 * (2 * weights * size.num_tokens + scores)


def peak_operations(device: torch.device) -> float:
    """Operations a second of a large bfloat16 product on this device, the best of five."""
    n = 8192 if device.type == "cuda" else 1024
    a, b, product = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(3))

    def multiply() -> None:
        for _ in range(8):
            torch.mm(a, b, out=product)
        _wait(device)

    multiply()
    return 8 * 2 * n**3 / min(_seconds(multiply) for _ in range(5))


def make_batch(shape: Mapping[str, Any], size: Size) -> list[Datum]:
    """Random documents, every token of them scored."""
    tokens = np.random.default_rng(0).integers(3, shape["vocab_size"], (size.num_documents, size.length + 1))
    return [Datum(tokens=row[:-1], loss_inputs={"target_tokens": row[1:]}) for row in tokens]


def engine_step(model: Path, batch: list[Datum], size: Size, *, compiled: bool) -> Callable[[], Any]:
    """forward_backward and optim_step of the default engine over one packed row."""
    engine = load_engine(TrainerConfig(model=model, max_tokens_per_microbatch=size.num_tokens, compile=compiled))
    loss = get_loss("cross_entropy")

    def step() -> None:
        engine.forward_backward([batch], loss)
        engine.optim_step(AdamParams(learning_rate=1e-6), 1 / size.num_tokens)

    return step


def transformers_step(model: Path, batch: list[Datum], device: torch.device, *, compiled: bool) -> Callable[[], Any]:
    """The step that one writes around a transformers model: float32 parameters, autocast, two documents at a time."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    forward: Any = torch.compile(network) if compiled else network
    inputs = torch.from_numpy(np.stack([datum.tokens for datum in batch])).to(device)
    targets = torch.from_numpy(np.stack([datum.loss_inputs["target_tokens"] for datum in batch])).to(device)

    def step() -> None:
        for start in range(0, len(batch), 2):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = forward(input_ids=inputs[start : start + 2], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets[start : start + 2].flatten(), reduction="sum"
            )
            (loss / inputs.numel()).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait(device)

    return step


def measure(step: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a step, after two that are not counted."""
    for _ in range(2):
        step()
    return statistics.median(_seconds(step) for _ in range(repeats))


def main() -> None:
    """Runs the benchmark and prints its result."""
    options_parser = parser(__doc__, quick="as without")
    options_parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = options_parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, size = (SMALL, Size(2, 64)) if options.smoke else (SHAPE, Size(8, 2048))
    repeats, compiled = (1, False) if options.smoke else (5, options.compile)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_qwen3(Path(folder) / "model", dtype=torch.bfloat16, **shape)
        batch = make_batch(shape, size)
        peak = peak_operations(device)
        seconds = {}
        for name, make in (
            ("ownloop", lambda: engine_step(model, batch, size, compiled=compiled)),
            ("transformers", lambda: transformers_step(model, batch, device, compiled=compiled)),
        ):
            seconds[name] = measure(make(), repeats)
            print(f"{name}: {seconds[name]:.3f} s a step, {size.num_tokens / seconds[name]:.0f} tokens/s", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print_result(
        "gpu_utilisation",
        [
            Bar(name="mfu", value=operations(shape, size) / seconds["ownloop"] / peak, limit=0.40, at_most=False),
            Bar(
                name="speed_over_transformers",
                value=seconds["transformers"] / seconds["ownloop"],
                limit=1.0,
                at_most=False,
            ),
        ],
        {
            "peak_tflops": peak / 1e12,
            "tokens_per_s": size.num_tokens / seconds["ownloop"],
            "compiled": compiled,
            "memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
        },
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
