"""Versions of tiny weights, published without a TorchStore, and engines that take them in."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from generator.engine import GenerationEngine
from rl.types import Completion, SamplingParams
from rl.weights.store import find_record
from tests.generator.engines import EngineFactory
from tests.generator.running import no_steps
from tests.stores import FakeStore
from trainer.push import WeightPublisher

PROMPTS = [list(range(3 + 3 * i, 33 + 4 * i)) for i in range(5)]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


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


def check_pulls(directory: Path, dtype: str, transport: str, store: FakeStore, build_engine: EngineFactory) -> None:
    """Raises AssertionError unless an engine that pulled three times equals one that is started with the third."""
    engine, torch_dtype = build_engine(directory, dtype), getattr(torch, dtype)
    publisher = WeightPublisher(torch_dtype, transport, store=store)

    async def main() -> None:
        before = await greedy(engine)
        for version in (1, 2, 3):
            await publisher.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
        after = await greedy(engine)
        exported = export(directory, moved(directory, 3), torch_dtype, directory.parent / "exported")
        assert [c.logprobs for c in after] == [c.logprobs for c in await greedy(build_engine(exported, dtype))]
        assert [c.logprobs for c in after] != [c.logprobs for c in before]
        assert {version for c in after for version in c.versions} == {3}
        assert engine.version == 3

    asyncio.run(main())
