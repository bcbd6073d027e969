"""The experts of vLLM on the CPU, replayed by the trainer in bfloat16."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from generator.engine import GenerationEngine
from rl.rollouts.episodes import rollout_to_datum
from rl.tiny_models import SERVABLE, tiny_qwen3_moe
from rl.types import Completion, Datum, Rollout, SamplingParams, Turn
from tests.generator.engines import EngineFactory
from trainer.config import TrainerConfig
from trainer.engines import load_engine

pytestmark = pytest.mark.vllm

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
}
PROMPTS = [tuple(np.random.default_rng(i).integers(3, 64, 40 + 7 * i).tolist()) for i in range(6)]
SAMPLING = SamplingParams(max_tokens=32, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {**SERVABLE, **SHAPE, "moe_intermediate_size": 64}
    return tiny_qwen3_moe(tmp_path_factory.mktemp("routes") / "model", **shape)


@pytest.fixture(scope="module")
def groups(build_engine: EngineFactory, model: Path) -> list[list[Completion]]:
    engine: GenerationEngine = build_engine(model, "bfloat16", routes=True)

    async def sample() -> list[list[Completion]]:
        first = await asyncio.gather(*(engine.generate(prompt, SAMPLING, 4) for prompt in PROMPTS))
        again = await engine.generate(PROMPTS[0], SAMPLING, 4)  # whose prompt is cached
        return [*first, again]

    return asyncio.run(sample())


def test_every_token_but_the_last_has_experts(groups: list[list[Completion]]) -> None:
    for prompt, group in zip([*PROMPTS, PROMPTS[0]], groups, strict=True):
        for sample in group:
            assert sample.routes is not None
            assert sample.routes.prompt is group[0].routes.prompt  # type: ignore[union-attr]
            assert sample.routes.prompt.shape == (len(prompt), 6, 4)
            assert sample.routes.sampled.shape == (len(sample.tokens) - 1, 6, 4)
            assert sample.routes.sampled.dtype == np.uint8
    assert np.array_equal(groups[0][0].routes.prompt, groups[-1][0].routes.prompt)  # type: ignore[union-attr]


def test_replay_takes_two_thirds_of_the_mismatch_away(groups: list[list[Completion]], model: Path) -> None:
    """The bar is 0.35 of the mean mismatch, on random weights, whose experts differ at a tenth of tokens and layers."""
    batch = [_datum(prompt, sample) for prompt, group in zip(PROMPTS, groups, strict=False) for sample in group]
    trainer = load_engine(TrainerConfig(model=model, compute_dtype="bfloat16"))
    free, replayed = (
        np.concatenate(
            [
                np.abs(p - d.loss_inputs["logprobs"])[d.counted]
                for p, d in zip(trainer.forward([data]).logprobs, data, strict=True)
            ]
        ).mean()
        for data in ([replace(datum, routes=None) for datum in batch], batch)
    )
    print(f"mean mismatch {free:.2e} free, {replayed:.2e} replayed: {replayed / free:.2f}")
    assert replayed < 0.35 * free


def _datum(prompt: tuple[int, ...], sample: Completion) -> Datum:
    turn = Turn(prompt_tokens=prompt, completion=sample)
    return rollout_to_datum(Rollout(turns=(turn,), reward=1.0, sampling=SAMPLING), 1.0)
