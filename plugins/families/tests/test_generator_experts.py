"""Pulls of mixtures of experts, which vLLM packs in place on the CPU, and adapters beside experts.

In a module of its own: the first engine of a process decides whether vLLM has a group for experts.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from generator.config import LoRALimits
from rl.lora import LoRAConfig
from rl.weights.store import find_record
from rl.weights.version import WeightsError, WeightsMismatchError
from tests.generator.adapted import largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS, export, greedy, moved, pull
from tests.generator.served_models import served_qwen3_moe
from tests.stores import FakeStore, key_of
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_experts_are_packed_again_after_every_pull(
    tmp_path: Path, build_engine: EngineFactory, dtype: str
) -> None:
    directory, store = served_qwen3_moe(tmp_path / "model"), FakeStore()
    engine, torch_dtype = build_engine(directory, dtype), getattr(torch, dtype)

    async def fresh(seed: int) -> list[tuple[float, ...]]:
        exported = export(directory, moved(directory, seed), torch_dtype, tmp_path / str(seed))
        return [c.logprobs for c in await greedy(build_engine(exported, dtype))]

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
    key = key_of(await find_record(store, 4), "model.norm.weight")
    kept = store.values.pop(key)
    with pytest.raises(WeightsError, match="TorchStore lost"):
        await pull(engine, store, 4)
    assert [c.logprobs for c in await greedy(engine)] == after
    store.values[key] = kept
    await pull(engine, store, 4)
    assert [c.logprobs for c in await greedy(engine)] == await fresh(4)


def test_experts_that_nothing_can_be_loaded_into_are_refused(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_qwen3_moe(tmp_path / "model", moe_intermediate_size=48)
    with pytest.raises(ValueError, match=r"each rank holds 48 of moe_intermediate_size.*a multiple of 32"):
        build_engine(directory, "float32")


async def test_attention_and_head_are_adapted_and_experts_are_not(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_qwen3_moe(tmp_path / "model")
    config = LoRAConfig(rank=4, alpha=8.0, train_mlp=False)
    limits = LoRALimits(max_rank=8, max_adapters=1, max_loaded=1)  # full, which is when vLLM's own kernels are wrong
    engine, adapter = build_engine(directory, "float32", lora=limits), random_adapter(directory, 1, config)
    with_experts = LoRAConfig(rank=4, train_attn=False, train_unembed=False)

    await pull_adapter(engine, "a", 1, adapter, config)
    for policy, model in ((None, merged(directory, {})), ("a", merged(directory, adapter, config))):
        found = await asyncio.gather(*(engine.generate(prompt, GREEDY, policy=policy) for prompt in PROMPTS))
        assert all(largest_error(model, p, c) < 5e-5 for p, (c,) in zip(PROMPTS, found, strict=True))
    with pytest.raises(WeightsMismatchError, match=r"'b' adapts .*experts.*, which this generator cannot adapt"):
        await pull_adapter(engine, "b", 1, random_adapter(directory, 1, with_experts), with_experts)
