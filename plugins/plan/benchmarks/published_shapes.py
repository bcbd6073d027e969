"""The shapes of a training step for which prime-rl publishes figures, on one GPU, beside those figures and the plan's.

    python -m plugins.plan.benchmarks.published_shapes [--shape NAME ...] [--smoke]

Each shape is computed twice: two rows of one document, as there, and two rows of groups, in which 16 answers of 960
tokens follow a prompt of 1,024. There the rate counts every token of every sample, as it would if each had its own
prompt. Weights are random. A step is `forward_backward` over both rows and `optim_step`, compiled unless it trains an
adapter, and recomputes activations, as theirs does.

`mfu` is by their formula: 6 operations for each weight of a product and token, or 4 and 6 for those of an adapter under
LoRA, and 12 * layers * width * length for attention, over the data sheet's rate. `mfu_causal` is by ours, which counts
the half of attention that is computed, with heads of their own size. The published figures are those of
https://github.com/PrimeIntellect-ai/prime-rl, benchmarks/results/BENCHMARKS.md of 2026-01-16: an H100 of 80 GB,
FlashAttention 3, two micro-batches.
"""

import gc
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, parser, print_result
from ownloop_plan.gpus import GPUS, Efficiency
from ownloop_plan.memory import trainer_memory
from ownloop_plan.sizes import ModelSize
from ownloop_plan.times import Work, operations, train_seconds
from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.system.hf_config import read_config, read_decoder_config
from rl.tiny_models import random_batch, tiny_qwen3
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import random_groups

ROWS, GROUP = 2, 16
GPU = GPUS["h100"]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "smoke": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the published table."""

    model: str
    loss: str
    length: int
    """Tokens of a micro-batch, which is one row."""
    rank: int | None = None
    """Of the adapter; None if all weights are trained."""
    tokens_per_s: float = 0.0
    """What was published."""
    mfu: float = 0.0
    memory_gib: float = 0.0

    @property
    def prompt(self) -> int:
        """Tokens of a group's prompt: as many as each of its answers and a fifteenth more."""
        return min(self.length, 16384) // GROUP

    @property
    def answer(self) -> int:
        """Tokens of each answer of a group, so that prompts and answers fill the row."""
        return self.prompt * (GROUP - 1) // GROUP

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.length // (self.prompt + GROUP * self.answer)


SHAPES: Mapping[str, Shape] = {
    "rl-16k": Shape("Qwen3-0.6B", "importance_sampling", 16384, None, 11_900, 0.111, 12.5),
    "rl-64k": Shape("Qwen3-0.6B", "importance_sampling", 65536, None, 10_150, 0.268, 19.6),
    "lora-16k": Shape("Qwen3-0.6B", "importance_sampling", 16384, 16, 13_340, 0.109, 5.1),
    "lora-64k": Shape("Qwen3-0.6B", "importance_sampling", 65536, 16, 9_970, 0.252, 11.5),
    "sft-8k": Shape("Qwen3-0.6B", "cross_entropy", 8192, None, 26_010, 0.168, 31.7),
    "sft-16k": Shape("Qwen3-0.6B", "cross_entropy", 16384, None, 25_490, 0.237, 52.8),
    "lora-4b-16k": Shape("Qwen3-4B", "importance_sampling", 16384, 16, 6_230, 0.217, 23.3),
}
SMOKE = Shape("smoke", "importance_sampling", 256, None, 1.0, 1.0, 1.0)


def config_of(shape: Shape, model: Path, *, compiled: bool) -> TrainerConfig:
    """A trainer that computes a row of the shape at a time."""
    lora = None if shape.rank is None else LoRAConfig(rank=shape.rank)
    return TrainerConfig(
        model=model,
        max_tokens_per_microbatch=shape.length,
        lora=lora,
        activation_checkpointing="full",
        compile=compiled and lora is None,
    )


def make_model(shape: Shape, folder: Path) -> Path:
    """A model of these sizes with random weights."""
    import torch

    small = shape.model == "smoke"
    vocab_size = 512 if small else 151_936
    return tiny_qwen3(
        folder / "model",
        num_kv_heads=2 if small else 8,
        head_dim=32 if small else 128,
        dtype=torch.bfloat16,
        vocab_size=vocab_size,
        max_position_embeddings=shape.length,
        initializer_range=0.02,
        **MODELS[shape.model],
    )


def make_rows(shape: Shape, *, grouped: bool) -> list[list[Datum]]:
    """The micro-batches of a step."""
    if grouped:
        sizes = [(shape.prompt, [shape.answer] * GROUP)] * shape.num_groups
        return [random_groups(sizes, seed=seed) for seed in range(ROWS)]
    return [random_batch([shape.length - 1], seed=seed) for seed in range(ROWS)]


def work_of(shape: Shape, *, grouped: bool) -> Work:
    """The step as the plan counts it."""
    if grouped:
        return Work(
            num_prompts=ROWS * shape.num_groups,
            group_size=GROUP,
            prompt_tokens=shape.prompt,
            completion_tokens=shape.answer,
        )
    return Work(num_prompts=ROWS, group_size=1, prompt_tokens=0, completion_tokens=shape.length)


def published_operations(config: Mapping[str, Any], length: int, adapter: int | None) -> float:
    """Operations of a token by the published formula; `adapter` is the number of an adapter's weights."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * width * config["head_dim"] * heads + 3 * width * config["intermediate_size"]
    weights = layers * layer + width * config["vocab_size"]
    linear = 6 * weights if adapter is None else 4 * weights + 6 * adapter
    return linear + 12.0 * layers * width * length


def measure(shape: Shape, model: Path, grouped: bool, compiled: bool) -> dict[str, float]:
    """Median seconds of three steps after two, and the peak of memory in GiB (0 without a GPU)."""
    import torch

    base = load_engine(config_of(shape, model, compiled=compiled))
    engine = base if shape.rank is None else base.adapter("a", LoRAConfig(rank=shape.rank))
    rows, loss, gpu = make_rows(shape, grouped=grouped), get_loss(shape.loss), torch.cuda.is_available()
    gc.collect()
    seconds: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        engine.forward_backward(rows, loss)
        engine.optim_step(AdamParams(learning_rate=1e-6), 1 / (ROWS * shape.length))
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return {"seconds": statistics.median(seconds[2:]), "memory_gib": memory}


def compared(shape: Shape, model: Path, *, grouped: bool, compiled: bool) -> dict[str, float]:
    """What is predicted, measured in a process of its own, and published."""
    config, size = config_of(shape, model, compiled=compiled), ModelSize(read_decoder_config(model))
    work = work_of(shape, grouped=grouped)
    counted = ROWS * (GROUP * shape.num_groups * (shape.prompt + shape.answer) if grouped else shape.length)
    predicted = train_seconds(size, config, work, GPU, Efficiency())
    memory = trainer_memory(size, config, GPU, accumulates=True)
    print(f"predicted: {counted / predicted:.0f} tokens/s, {memory.allocated / 2**30:.1f} GiB", flush=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(measure, (shape, model, grouped, compiled))
    rate = counted / found["seconds"]
    adapter = None if config.lora is None else size.adapter(config.lora)
    once = operations(size, replace(config, activation_checkpointing="none"), work)
    of_token = published_operations(
        read_config(model), shape.prompt + shape.answer if grouped else shape.length, adapter
    )
    return {
        "tokens_per_s": rate,
        "over_published": rate / shape.tokens_per_s,
        "predicted_tokens_per_s": counted / predicted,
        "mfu": rate * of_token / GPU.operations,
        "mfu_causal": once / found["seconds"] / GPU.operations,
        "memory_gib": found["memory_gib"],
        "predicted_memory_gib": memory.allocated / 2**30,
        "published_tokens_per_s": shape.tokens_per_s,
        "published_mfu": shape.mfu,
        "published_memory_gib": shape.memory_gib,
    }


def main() -> None:
    """Measures the shapes and prints the result."""
    options_parser = parser(__doc__, quick="as without")
    options_parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["rl-16k"], metavar="NAME")
    options = options_parser.parse_args()
    shapes = {"smoke": SMOKE} if options.smoke else {name: SHAPES[name] for name in options.shape}
    bars: list[Bar] = []
    figures: dict[str, object] = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(shape, Path(folder))
            for kind, limit in (("documents", 2.0), ("groups", 6.0)):
                found = compared(shape, model, grouped=kind == "groups", compiled=not options.smoke)
                print(f"{name}, {kind}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
                figures |= {f"{name}_{kind}_{key}": value for key, value in found.items()}
                over = found["over_published"]
                bars.append(Bar(name=f"{name}_{kind}_over_published", value=over, limit=limit, at_most=False))
    print_result("published_shapes", bars, figures)


if __name__ == "__main__":
    main()
