"""Versions of tiny weights, published without a TorchStore, and engines that take them in."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from generator.engine import GenerationEngine
from rl.types import Completion, SamplingParams
from rl.weights.versions import find_record
from tests.generator.running import no_steps
from tests.stores import FakeStore

PROMPTS = [list(range(3 + 3 * i, 33 + 4 * i)) for i in range(5)]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


async def greedy(engine: GenerationEngine, sampling: SamplingParams = GREEDY) -> list[Completion]:
    # One after the other: how requests fall into batches changes the last bits of a log-prob.
    return [(await engine.generate(prompt, sampling))[0] for prompt in PROMPTS]


async def pull(engine: GenerationEngine, store: FakeStore, version: int, **options: Any) -> None:
    with no_steps() if options.get("mode") == "inflight" else nullcontext():
        await engine.update_weights(await find_record(store, version), store, **options)


def moved(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Float32 weights, every one of them another than in the directory."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    return {name: t + 0.03 * torch.randn(t.shape, generator=generator) for name, t in weights.items()}


def export(source: Path, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, destination: Path) -> Path:
    destination.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (destination / path.name).write_bytes(path.read_bytes())
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(cast, destination / "model.safetensors", metadata={"format": "pt"})
    return destination
