"""Weights from sharded ranks through TorchStore into vLLM, in real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from controller.generator_handle import GeneratorHandle
from controller.mesh import Mesh
from controller.store import WeightStore
from generator.config import GeneratorConfig
from rl.types import Completion, SamplingParams
from rl.weights import Transport, UnknownVersionError, WeightsError, WeightsMismatchError
from tests.e2e.publisher_actor import Publisher, perturbed
from tests.generator.served_models import served_llama, served_qwen3

pytestmark = pytest.mark.e2e

PROMPTS = [list(range(3 + 3 * i, 33 + 4 * i)) for i in range(6)]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def _config(directory: Path, dtype: str) -> GeneratorConfig:
    return GeneratorConfig(model=directory, dtype=dtype, max_model_len=128, max_num_seqs=8)  # pyright: ignore[reportArgumentType]


@asynccontextmanager
async def _publisher(directory: Path, dtype: str, transport: Transport, log_dir: Path) -> AsyncGenerator[Mesh]:
    env = {"OMP_NUM_THREADS": "1"}
    arguments = (directory, getattr(torch, dtype), transport)
    mesh = await Mesh.spawn("publisher", Publisher, *arguments, num_ranks=2, env=env, log_dir=log_dir)
    try:
        yield mesh
    finally:
        await mesh.stop()


@asynccontextmanager
async def _generator(directory: Path, dtype: str, log_dir: Path) -> AsyncGenerator[GeneratorHandle]:
    handle = await GeneratorHandle.launch(_config(directory, dtype), log_dir)
    try:
        yield handle
    finally:
        await handle.stop()


async def _publish(mesh: Mesh, version: int, drop: tuple[str, ...] = ()) -> None:
    await mesh.answer(mesh.actors.publish.call(version, drop), timeout_s=60)


async def _greedy(generator: GeneratorHandle) -> list[Completion]:
    # One after the other: how requests fall into batches changes the last bits of a log-prob.
    return [(await generator.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


def _export(source: Path, version: int, dtype: str, destination: Path) -> Path:
    """Writes what `Publisher` publishes as a model directory of its own."""
    destination.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (destination / path.name).write_bytes(path.read_bytes())
    weights = {name: t.to(getattr(torch, dtype)) for name, t in perturbed(source, version).items()}
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    return destination


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "transport"),
    [
        ("llama", True, "bfloat16", "shared_memory"),
        ("qwen3", False, "float32", "shared_memory"),
        ("llama", True, "float32", "torchstore"),
    ],
)
def test_pulled_weights_generate_what_a_fresh_engine_does(
    tmp_path: Path, family: str, tied: bool, dtype: str, transport: Transport
) -> None:
    served = served_llama if family == "llama" else served_qwen3
    directory = served(tmp_path / "model", tied=tied)

    async def main() -> None:
        store = await WeightStore.launch(tmp_path / "logs")
        try:
            async with (
                _publisher(directory, dtype, transport, tmp_path / "logs") as publisher,
                _generator(directory, dtype, tmp_path / "logs") as generator,
                _generator(_export(directory, 7, dtype, tmp_path / "exported"), dtype, tmp_path / "fresh") as fresh,
            ):
                before = await _greedy(generator)
                for version in (5, 6, 7):
                    await _publish(publisher, version)
                    await generator.pull_model_state_dict(version)
                assert await generator.version() == 7
                after, expected = await _greedy(generator), await _greedy(fresh)
                assert [c.tokens for c in after] == [c.tokens for c in expected]
                assert [c.logprobs for c in after] == [c.logprobs for c in expected]
                assert [c.tokens for c in after] != [c.tokens for c in before]
                assert {v for c in before for v in c.versions} == {0}
                assert {v for c in after for v in c.versions} == {7}
        finally:
            await store.stop()

    asyncio.run(main())


def test_a_version_that_cannot_be_pulled_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    directory = served_llama(tmp_path / "model", tied=True)

    async def main() -> None:
        store = await WeightStore.launch(tmp_path / "logs")
        try:
            async with _generator(directory, "float32", tmp_path / "logs") as generator:
                with pytest.raises(UnknownVersionError, match=r"version 1 cannot be pulled.*nothing was pushed yet"):
                    await generator.pull_model_state_dict(1)
                async with _publisher(directory, "float32", "shared_memory", tmp_path / "logs") as publisher:
                    for version in (1, 2, 3):
                        await _publish(publisher, version)
                    await generator.pull_model_state_dict(2)
                    reference = await _greedy(generator)
                    with pytest.raises(
                        UnknownVersionError, match="version 1 cannot be pulled; versions that can: 2, 3"
                    ):
                        await generator.pull_model_state_dict(1)
                    with pytest.raises(ValueError, match="a prompt of 126 tokens and max_tokens=24 need 150 tokens"):
                        await generator.generate([5] * 126, GREEDY)
                async with _publisher(directory, "bfloat16", "shared_memory", tmp_path / "logs") as publisher:
                    await _publish(publisher, 4)
                    with pytest.raises(
                        WeightsMismatchError, match=r"published as torch\.bfloat16.*holds torch\.float32"
                    ):
                        await generator.pull_model_state_dict(4)
                async with _publisher(directory, "float32", "shared_memory", tmp_path / "logs") as publisher:
                    await _publish(publisher, 5, drop=("model.norm.weight",))
                    with pytest.raises(WeightsMismatchError, match=r"missing: model\.norm\.weight"):
                        await generator.pull_model_state_dict(5)
                    os.kill(publisher.pids[0], signal.SIGKILL)
                    while Path(f"/proc/{publisher.pids[0]}/fd").exists():
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(0.2)
                assert await generator.version() == 2
                assert await _greedy(generator) == reference
        finally:
            await store.stop()

    asyncio.run(main())


def test_a_publisher_that_died_is_named(tmp_path: Path) -> None:
    directory = served_llama(tmp_path / "model", tied=True)

    async def main() -> None:
        store = await WeightStore.launch(tmp_path / "logs")
        try:
            async with _generator(directory, "float32", tmp_path / "logs") as generator:
                async with _publisher(directory, "float32", "shared_memory", tmp_path / "logs") as publisher:
                    await _publish(publisher, 1)
                with pytest.raises(WeightsError, match="which is gone; they have to be pushed again"):
                    await generator.pull_model_state_dict(1)
                assert await generator.version() == 0
        finally:
            await store.stop()

    asyncio.run(main())


def test_perturbed_weights_differ_between_versions(tmp_path: Path) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    assert torch.equal(
        perturbed(directory, 0)["model.norm.weight"], load_file(directory / "model.safetensors")["model.norm.weight"]
    )
    first, second = perturbed(directory, 1), perturbed(directory, 2)
    assert not any(torch.equal(first[name], second[name]) for name in first)
