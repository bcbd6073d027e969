"""Requests of several adapters and of the model itself in the same batches, each compared with merged weights."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.config import LoRALimits
from generator.engine import GenerationEngine
from rl.lora import LoRAConfig, Policy
from rl.types import Completion, SamplingParams
from tests.generator.adapted import WHOLE, largest_error, merged, pull_adapter, random_adapter
from tests.generator.engines import EngineFactory
from tests.generator.published import GREEDY, PROMPTS, export, greedy, moved, pull
from tests.generator.served_models import served_llama, served_qwen3
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

TIGHT = LoRALimits(max_rank=8, max_adapters=3, max_loaded=5)
ATTENTION = LoRAConfig(rank=8, alpha=4.0, train_mlp=False, train_unembed=False)
HEAD = LoRAConfig(rank=1, alpha=2.0, train_attn=False, train_mlp=False)


async def together(
    engine: GenerationEngine, policies: Sequence[Policy], sampling: SamplingParams = GREEDY
) -> dict[tuple[Policy, int], Completion]:
    """A completion of every prompt under every policy, sampled at the same time."""
    keys = [(policy, index) for index in range(len(PROMPTS)) for policy in policies]
    found = await asyncio.gather(*(engine.generate(PROMPTS[i], sampling, policy=policy) for policy, i in keys))
    return {key: completions[0] for key, completions in zip(keys, found, strict=True)}


def _errors(completions: Mapping[tuple[Policy, int], Completion], policy: Policy, model: Any) -> float:
    return max(largest_error(model, PROMPTS[i], c) for (each, i), c in completions.items() if each == policy)


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("family", [served_llama, served_qwen3])
async def test_logprobs_are_those_of_merged_weights(
    tmp_path: Path, build_engine: EngineFactory, family: Any, tied: bool
) -> None:
    # Three adapters take every slot, which is when vLLM's own kernels give the model itself the last slot's adapter.
    directory = family(tmp_path / "model", tied=tied)
    engine, plain = build_engine(directory, "float32", lora=TIGHT), build_engine(directory, "float32")
    configs = {"whole": WHOLE, "attention": ATTENTION, "head": HEAD}
    adapters = {name: random_adapter(directory, i, config) for i, (name, config) in enumerate(configs.items())}

    alone = await greedy(plain)
    assert [c.logprobs for c in await greedy(engine)] == [c.logprobs for c in alone]
    for name, adapter in adapters.items():
        await pull_adapter(engine, name, 7, adapter, configs[name])
    completions = await together(engine, [None, *adapters])
    for name, adapter in adapters.items():
        assert _errors(completions, name, merged(directory, adapter, configs[name])) < 5e-5
        assert {v for (p, _), c in completions.items() if p == name for v in c.versions} == {7}
    assert [completions[None, i].tokens for i in range(len(PROMPTS))] == [c.tokens for c in alone]
    assert {v for (p, _), c in completions.items() if p is None for v in c.versions} == {0}
    assert [c.logprobs for c in await greedy(engine)] == [c.logprobs for c in alone]
    for name in adapters:
        assert all(completions[name, i].logprobs != completions[None, i].logprobs for i in range(len(PROMPTS)))


async def test_more_adapters_than_slots_take_turns(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=TIGHT)
    names = [f"a{i}" for i in range(5)]

    for i, name in enumerate(names):
        await pull_adapter(engine, name, i, random_adapter(directory, i))
    for _ in range(2):  # in the second round every slot holds an adapter of the first
        completions = await together(engine, [None, *names])
        for i, name in enumerate(names):
            assert _errors(completions, name, merged(directory, random_adapter(directory, i))) < 5e-5
            assert {v for (p, _), c in completions.items() if p == name for v in c.versions} == {i}


@pytest.mark.parametrize("transport", ["shared_memory", "torchstore"])
async def test_the_model_itself_is_pulled_under_adapters(
    tmp_path: Path, build_engine: EngineFactory, transport: Any
) -> None:
    directory, store = served_llama(tmp_path / "model", tied=True), FakeStore()
    engine, adapter = build_engine(directory, "float32", lora=TIGHT), random_adapter(directory, 1)
    publisher = WeightPublisher(torch.float32, transport, store=store)
    exported = export(directory, moved(directory, 5), torch.float32, tmp_path / "exported")
    fresh = build_engine(exported, "float32")

    await pull_adapter(engine, "a", 2, adapter)
    for version in (4, 5):  # the first pull records its copies, the second repeats them
        await publisher.publish(version, moved(directory, version).items())
        await pull(engine, store, version)
    assert [c.logprobs for c in await greedy(engine)] == [c.logprobs for c in await greedy(fresh)]
    completions = await together(engine, [None, "a"])
    assert _errors(completions, "a", merged(exported, adapter)) < 5e-5
    assert {v for (p, _), c in completions.items() for v in c.versions if p is None} == {5}
    assert {v for (p, _), c in completions.items() for v in c.versions if p == "a"} == {2}


async def test_what_cannot_be_served_is_named_and_harms_no_one(tmp_path: Path, build_engine: EngineFactory) -> None:
    directory = served_llama(tmp_path / "model", tied=True)
    engine = build_engine(directory, "float32", lora=TIGHT)
    adapter = random_adapter(directory, 1)
    too_wide = LoRAConfig(rank=9)
    foreign = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in adapter.items()}
    halved = {**adapter, min(adapter): adapter[min(adapter)][:, :-1]}

    async def refused(message: str, call: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(ValueError, match=message):
            await call

    await pull_adapter(engine, "a", 1, adapter)
    before = await together(engine, [None, "a"])
    running = asyncio.create_task(together(engine, [None, "a"]))
    await refused(
        r"'b' has rank 9; this generator takes ranks of at most 8 \(LoRALimits.max_rank\)",
        pull_adapter(engine, "b", 1, random_adapter(directory, 1, too_wide), too_wide),
    )
    await refused("adapts model.layers.2.mlp.down_proj, which", pull_adapter(engine, "b", 1, foreign))
    await refused("lora_A.weight is .* instead of", pull_adapter(engine, "b", 1, halved))
    await refused("published as torch.bfloat16", pull_adapter(engine, "b", 1, adapter, dtype=torch.bfloat16))
    await refused("'b', which this generator does not have; it has None, 'a'", _sample(engine, "b"))
    await refused(r"\('a', 3\), which this generator does not have", _sample(engine, ("a", 3)))
    await refused("policy is 'b', which", engine.drop_policy("b"))
    for version in (2, 3, 4, 5):
        await pull_adapter(engine, "a", version, adapter, frozen=True)
    await refused(r"holds 5 adapters and frozen versions; drop one", pull_adapter(engine, "b", 1, adapter))
    for completions in (await running, await together(engine, [None, "a"])):
        assert {key: c.tokens for key, c in completions.items()} == {key: c.tokens for key, c in before.items()}


async def _sample(engine: GenerationEngine, policy: Policy) -> list[Completion]:
    return await engine.generate(PROMPTS[0], GREEDY, policy=policy)
