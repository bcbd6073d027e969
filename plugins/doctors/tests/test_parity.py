"""Trainer and generator of a tiny model agree, and what was put between them is named."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from controller.handles.adapters import BoundGenerator
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig, LoRALimits
from ownloop_doctors.mismatch import Comparison, compare, explain, measure_parity
from ownloop_doctors.vocabulary import distributions
from rl.data.sources import text_to_datum
from rl.lora import LivePolicy, LoRAConfig, Policy
from rl.protocols import Generator, Trainer
from rl.types import Completion, Datum, ForwardBackwardOutput, PullMode, SamplingParams
from tests.e2e.weight_meshes import PROMPTS
from tests.generator.published import export, moved
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

SAMPLING = SamplingParams(max_tokens=16)


class _LeakyTrainer:
    """A trainer whose packed sequences see each other."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    async def forward(self, batch: Sequence[Datum]) -> ForwardBackwardOutput:
        output = await self._trainer.forward(batch)
        return output if len(batch) == 1 else replace(output, logprobs=[p - 0.5 for p in output.logprobs])


class _WrongAdapter(_LeakyTrainer):
    """A trainer whose adapter is not the one that is served."""

    async def forward(self, batch: Sequence[Datum]) -> ForwardBackwardOutput:
        output = await self._trainer.forward(batch)
        return replace(output, logprobs=[p - 0.1 for p in output.logprobs])


class _StaleGenerator:
    """A generator that keeps the weights of its first pull."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._pulled = False

    async def generate(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, num_samples: int = 1, *, policy: Policy = None
    ) -> list[Completion]:
        return await self._generator.generate(prompt_tokens, sampling, num_samples, policy=policy)

    async def pull_model_state_dict(
        self,
        version: int,
        *,
        policy: LivePolicy = None,
        frozen: bool = False,
        mode: PullMode = "drain",
        keep_prefix_cache: bool = False,
    ) -> None:
        if not self._pulled:
            await self._generator.pull_model_state_dict(
                version, policy=policy, frozen=frozen, mode=mode, keep_prefix_cache=keep_prefix_cache
            )
        self._pulled = True

    async def drop_policy(self, policy: Policy) -> None:
        await self._generator.drop_policy(policy)


def _sentence(found: Comparison) -> str:
    return explain([mismatch.mean for mismatch in found.mismatches], found.stepped.mean, found.step.mean, found.causes)


async def test_each_cause_is_told_from_the_others(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    other = export(model, moved(model, 3), torch.float32, tmp_path / "other")
    trainer = TrainerConfig(compute_dtype="float32")
    all_words = {"max_logprobs": -1}
    generator = GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=8, engine_args=all_words)

    async with Launcher(tmp_path / "logs") as launcher:
        train, generate = await asyncio.gather(
            launcher.trainer(model, trainer, generator=generator), launcher.generator(other, generator)
        )
        stale = await compare(train, generate, PROMPTS, SAMPLING)
        assert "by the generator's weights: before a pull they are not the trainer's." in _sentence(stale)
        configured, uncut, pulled, alone = stale.mismatches
        assert configured.mean > 0.05 < uncut.mean
        assert pulled.mean < 1e-4
        assert alone.max < 1e-3 > stale.stepped.max
        same = await compare(train, generate, PROMPTS, SAMPLING)
        assert _sentence(same).startswith("There is no mismatch to explain")
        assert same.mismatches[0].mean_exp == pytest.approx(1, abs=1e-4)
        p, q = await distributions(train, generate, PROMPTS[0])
        assert p.shape == (min(4, len(PROMPTS[0]) - 1), 64)
        np.testing.assert_allclose(p, q, atol=1e-4)
        hot = await compare(train, generate, PROMPTS, replace(SAMPLING, temperature=1.5, top_p=0.8))
        assert _sentence(hot).startswith("There is no mismatch to explain")
        effects = {side.name: side.mean for side in hot.sides}
        assert effects["trainer: at temperature 1"] > 0.05 < effects["trainer: of all tokens, not kept ones"]
        leaky = await compare(_LeakyTrainer(train), generate, PROMPTS, SAMPLING)  # pyright: ignore[reportArgumentType]
        assert "100% by packing" in _sentence(leaky)
        unpulled = await compare(train, _StaleGenerator(generate), PROMPTS, SAMPLING)
        assert "the pulled weights are not the trainer's" in _sentence(unpulled)


async def test_two_runs_at_a_time_pull_their_own_weights(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    models = model, export(model, moved(model, 3), torch.float32, tmp_path / "other")
    trainer = TrainerConfig(compute_dtype="float32")
    generator = GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=8, weight_transport="torchstore")

    async with Launcher(tmp_path / "one") as one, Launcher(tmp_path / "two") as two:
        launchers = one, two
        starts = [
            each.trainer(path, trainer, generator=generator) for each, path in zip(launchers, models, strict=True)
        ]
        trainers = await asyncio.gather(*starts)
        generators = await asyncio.gather(*(each.generator(model, generator) for each in launchers))
        assert [await each.push_model_state_dict() for each in trainers] == [0, 0]
        for each in generators:
            await each.pull_model_state_dict(0)
        sampled = [(await each.generate(PROMPTS[0], SAMPLING))[0] for each in generators]
        for train, completion in zip(trainers, sampled, strict=True):
            output = await train.forward([text_to_datum(PROMPTS[0], completion.tokens, "completion")])
            assert output.logprobs[0][-len(completion.tokens) :] == pytest.approx(completion.logprobs, abs=1e-4)
        crossed = await trainers[0].forward([text_to_datum(PROMPTS[0], sampled[1].tokens, "completion")])
        assert abs(crossed.logprobs[0][-len(sampled[1].tokens) :] - np.array(sampled[1].logprobs)).max() > 0.01


@pytest.mark.slow
async def test_an_adapter_is_told_from_the_frozen_model(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    trainer = TrainerConfig(compute_dtype="float32", lora=LoRAConfig(rank=8))
    generator = GeneratorConfig(dtype="float32", max_model_len=128, max_num_seqs=8, lora=LoRALimits(max_rank=8))

    async with Launcher(tmp_path / "logs") as launcher:
        train, base, generate = await asyncio.gather(
            launcher.trainer(model, trainer, generator=generator),
            launcher.reference(model, trainer),
            launcher.generator(model, generator),
        )
        assert isinstance(generate, BoundGenerator)
        frozen = base, generate.unbound
        same = await compare(train, generate, PROMPTS, SAMPLING, frozen)
        assert _sentence(same).startswith("There is no")
        assert all(mismatch.mean < 1e-4 for mismatch in (*same.mismatches, same.stepped))
        with_adapter = await train.forward([text_to_datum(*same.sequences[0], "completion")])
        without = await base.forward([text_to_datum(*same.sequences[0], "completion")])
        assert abs(with_adapter.logprobs[0] - without.logprobs[0]).max() > 0.01  # it has learned something
        wrong = await compare(_WrongAdapter(train), generate, PROMPTS, SAMPLING, frozen)  # pyright: ignore[reportArgumentType]
        assert "100% by the adapter: over the frozen model alone both sides agree." in _sentence(wrong)


@pytest.mark.slow
def test_another_dtype_is_named(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    models = (model, shutil.copytree(model, tmp_path / "copy"))
    trainer = TrainerConfig(compute_dtype="float32")
    generator = GeneratorConfig(dtype="float16", max_model_len=128, max_num_seqs=8)
    report = asyncio.run(measure_parity(models, trainer, generator, PROMPTS, SAMPLING, tmp_path / "logs"))
    assert "by the dtype: in float32 both sides agree" in report.explanation
    assert report.mismatches[-1].mean < 1e-5 < 1e-4 < report.mismatches[0].mean == report.worst
    table = report.table()
    assert "generator: float32, not float16" in table
    assert report.explanation in table
