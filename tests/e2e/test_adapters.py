"""Adapters in a tensor-parallel generator behind its handle: pulled, replaced, frozen and dropped."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from controller.handles.generator_handle import GeneratorHandle
from generator.config import GeneratorConfig, LoRALimits
from rl.lora import Policy
from rl.types import Completion, SamplingParams
from rl.weights.version import VersionRecords
from tests.e2e.weight_meshes import GREEDY, PROMPTS, running_generator, running_store, working
from tests.generator.adapted import WHOLE, Adapter, largest_error, merged, random_adapter
from tests.generator.served_models import served_llama
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


CONFIG = GeneratorConfig(
    dtype="float32",
    tensor_parallel=2,
    max_model_len=128,
    max_num_seqs=32,
    lora=LoRALimits(max_rank=8, max_adapters=3, max_loaded=8),
)


async def _sample(generator: GeneratorHandle, policy: Policy) -> list[Completion]:
    found = await asyncio.gather(*(generator.generate(prompt, GREEDY, policy=policy) for prompt in PROMPTS))
    return [completions[0] for completions in found]


async def test_two_ranks_serve_adapters_as_merged_weights_would(tmp_path: Path) -> None:
    directory, records = served_llama(tmp_path / "model", tied=True), VersionRecords()
    config = replace(CONFIG, model=directory)
    adapters = {name: random_adapter(directory, seed) for seed, name in enumerate("abc")}
    publishers = {name: WeightPublisher(torch.float32, policy=name, lora=WHOLE, store=FakeStore()) for name in adapters}

    def error(completions: list[Completion], adapter: Adapter) -> float:
        model = merged(directory, adapter)
        return max(largest_error(model, prompt, c) for prompt, c in zip(PROMPTS, completions, strict=True))

    async def push(name: str, version: int, adapter: Adapter) -> None:
        record = await publishers[name].publish(version, adapter.items())
        assert record is not None
        records.add(record)

    async def drive(generator: GeneratorHandle) -> None:
        for name, adapter in adapters.items():
            await push(name, 1, adapter)
            await generator.pull_model_state_dict(1, policy=name)
        every = await asyncio.gather(*(_sample(generator, policy) for policy in (None, *adapters)))
        for completions, adapter in zip(every, ({}, *adapters.values()), strict=True):
            assert error(completions, adapter) < 5e-5

        newest = random_adapter(directory, 9)
        for version in (2, 3):  # version 1 is no longer published then, but the generator has it
            await push("a", version, newest)
        await generator.pull_model_state_dict(1, policy="a", frozen=True)
        running = asyncio.create_task(
            generator.generate(PROMPTS[0], SamplingParams(max_tokens=90, seed=1, ignore_eos=True), 64, policy="a")
        )
        await working(generator)
        await generator.pull_model_state_dict(3, policy="a", mode="inflight")
        assert {version for c in await running for version in c.versions} == {1, 3}
        assert error(await _sample(generator, "a"), newest) < 5e-5
        assert error(await _sample(generator, ("a", 1)), adapters["a"]) < 5e-5
        await generator.drop_policy("b")
        with pytest.raises(ValueError, match=r"policy is 'b', which .*; it has None, 'a', 'c', \('a', 1\)"):
            await _sample(generator, "b")
        assert error(await _sample(generator, "c"), adapters["c"]) < 5e-5

    async with running_store(logs := tmp_path / "logs") as store:
        generator = await GeneratorHandle.launch(config, logs, version_records=records, store_name=store.name)
        try:
            await drive(generator)
        finally:
            await generator.stop()


async def test_two_ranks_score_prompts_together_as_alone(tmp_path: Path) -> None:
    directory, numbers = served_llama(tmp_path / "model", tied=True), random.Random(0)
    prompts = [[numbers.randrange(3, 60) for _ in range(48)] for _ in range(8)]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)

    async def scores(prompt: list[int]) -> torch.Tensor:
        (completion,) = await generator.generate(prompt, sampling)
        return torch.tensor(completion.prompt_logprobs)

    lora, logs = LoRALimits(max_rank=8), tmp_path / "logs"
    async with running_generator(directory, "float32", logs, tensor_parallel=2, lora=lora) as generator:
        alone = [await scores(prompt) for prompt in prompts]
        for _ in range(3):
            together = await asyncio.gather(*map(scores, prompts))
            assert max(float((a - b).abs().max()) for a, b in zip(alone, together, strict=True)) < 5e-5
