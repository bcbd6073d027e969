"""What end-to-end tests of weights start and stop."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from controller.handles.generator_handle import GeneratorHandle
from controller.handles.store import WeightStore
from controller.processes.mesh import Mesh
from generator.config import GeneratorConfig
from rl.types import Completion, SamplingParams, WeightTransport
from tests.e2e.publisher_actor import Publisher
from tests.waiting import LIMIT_S

PROMPTS = [list(range(3 + 3 * i, 33 + 4 * i)) for i in range(5)]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


@asynccontextmanager
async def running_store(log_dir: Path, **options: Any) -> AsyncGenerator[WeightStore]:
    store = await WeightStore.launch(log_dir, **options)
    try:
        yield store
    finally:
        await store.stop()


@asynccontextmanager
async def running_publisher(
    store: WeightStore, directory: Path, dtype: str, transport: WeightTransport, log_dir: Path, *, num_ranks: int = 2
) -> AsyncGenerator[Mesh]:
    """Ranks, each with its shard of every weight."""
    env, arguments = {"OMP_NUM_THREADS": "1"}, (directory, getattr(torch, dtype), transport, store.name)
    mesh = await Mesh.spawn("publisher", Publisher, *arguments, num_ranks=num_ranks, env=env, log_dir=log_dir)
    try:
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def running_generator(
    directory: Path, dtype: str, log_dir: Path, store: WeightStore | None = None, **options: Any
) -> AsyncGenerator[GeneratorHandle]:
    options = {"max_model_len": 128, "max_num_seqs": 8, **options}
    config = GeneratorConfig(model=directory, dtype=dtype, **options)  # pyright: ignore[reportArgumentType]
    handle = await GeneratorHandle.launch(config, log_dir, store_name=None if store is None else store.name)
    try:
        yield handle
    finally:
        await handle.stop()


async def publish(mesh: Mesh, version: int, seed: int, drop: tuple[str, ...] = ()) -> None:
    """Every rank of `running_publisher` publishes."""
    await mesh.call("publish", [(version, seed, drop)] * mesh.num_ranks)


async def renew(mesh: Mesh, dtype: str, transport: WeightTransport) -> None:
    """Every rank of `running_publisher` gets a new publisher."""
    await mesh.call("renew", [(getattr(torch, dtype), transport)] * mesh.num_ranks)


async def greedy(generator: GeneratorHandle) -> list[Completion]:
    """One after the other: how requests fall into batches changes the last bits of a log-prob."""
    return [(await generator.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


def export(source: Path, weights: Mapping[str, torch.Tensor], dtype: str, destination: Path) -> Path:
    """A model directory like `source` with other weights."""
    destination.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (destination / path.name).write_bytes(path.read_bytes())
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    save_file(cast, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


async def working(generator: GeneratorHandle) -> None:
    """Waits until a generator has requests, of which it takes a step before it takes another command."""
    async with asyncio.timeout(LIMIT_S):
        while not (await generator.mesh.call("num_unfinished", [()]))[0]:
            await asyncio.sleep(0.001)
