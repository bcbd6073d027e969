"""Pulls of mixtures of experts, which vLLM packs in place on the CPU.

In a module of its own: the first engine of a process decides whether vLLM has a group for experts.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from rl.weights.manifest import WeightsError
from rl.weights.registry import find_record
from tests.generator.conftest import EngineFactory
from tests.generator.published import export, greedy, moved, pull
from tests.generator.served_models import served_qwen3_moe
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_packed_again_after_every_pull(tmp_path: Path, build_engine: EngineFactory, dtype: str) -> None:
    directory, store = served_qwen3_moe(tmp_path / "model"), FakeStore()
    engine, torch_dtype = build_engine(directory, dtype), getattr(torch, dtype)

    async def fresh(seed: int) -> list[tuple[float, ...]]:
        exported = export(directory, moved(directory, seed), torch_dtype, tmp_path / str(seed))
        return [c.logprobs for c in await greedy(build_engine(exported, dtype))]

    async def main() -> None:
        before = [c.logprobs for c in await greedy(engine)]
        publisher = WeightPublisher(torch_dtype, "shared_memory", store=store)
        for version in (1, 2, 3):
            await publisher.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
        after = [c.logprobs for c in await greedy(engine)]
        assert after == await fresh(3)
        assert after != before
        publisher = WeightPublisher(torch_dtype, "torchstore", store=store)
        await publisher.publish(4, moved(directory, 4).items())
        key = (await find_record(store, 4)).key("model.norm.weight")
        kept = store.values.pop(key)
        with pytest.raises(WeightsError, match="TorchStore lost"):
            await pull(engine, store, 4)
        assert [c.logprobs for c in await greedy(engine)] == after
        store.values[key] = kept
        await pull(engine, store, 4)
        assert [c.logprobs for c in await greedy(engine)] == await fresh(4)

    asyncio.run(main())


def test_experts_that_nothing_can_be_loaded_into_are_refused(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_qwen3_moe(tmp_path / "model", moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"each rank holds 48 of moe_intermediate_size.*a multiple of 32"):
        build_engine(directory, "float32")
