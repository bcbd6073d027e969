"""Pulls of models that are not Llamas: after three an engine equals a fresh one, and transformers in float32."""

import asyncio
import contextlib
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.types import SamplingParams
from rl.weights.store import find_record
from tests.architectures import MODELS
from tests.generator.engines import EngineFactory, engine_factory
from tests.generator.published import PROMPTS, export, greedy, moved, pull
from tests.stores import FakeStore
from trainer.push import WeightPublisher

pytestmark = pytest.mark.vllm

WITH_CODE_OF_TRANSFORMERS = ("hunyuan", "olmo2", "olmo3", "seed_oss", "smollm3")
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=True)


def check_pulls(directory: Path, dtype: str, build_engine: EngineFactory) -> None:
    """After three pulls an engine equals a fresh one bit by bit, and in float32 scores as transformers does."""
    folder, torch_dtype, store = directory.parent, getattr(torch, dtype), FakeStore()
    exported = export(directory, moved(directory, 3), torch_dtype, folder / "3")
    # Before there is an engine: vLLM changes classes of transformers that it serves.
    expected = _logprobs(exported) if dtype == "float32" else []
    engine = build_engine(directory, dtype)

    async def main() -> None:
        before = await greedy(engine)
        publisher = WeightPublisher(torch_dtype, "shared_memory", store=store)
        for version in (1, 2, 3):
            await publisher.publish(version, moved(directory, version).items())
            await pull(engine, store, version)
        after = [c.logprobs for c in await greedy(engine)]
        plan = engine._updates._loader._plan  # pyright: ignore[reportPrivateUsage]
        assert plan is not None
        assert plan.fits(await find_record(store, 3)), "the third pull repeated the copies of the first"
        assert after == [c.logprobs for c in await greedy(build_engine(exported, dtype))]
        assert all(one != other.logprobs for one, other in zip(after, before, strict=True))
        for prompt, logprobs in zip(PROMPTS, expected, strict=False):
            (completion,) = await engine.generate(prompt, SCORED)
            assert completion.prompt_logprobs == pytest.approx(logprobs, abs=5e-5)

    asyncio.run(main())


@torch.no_grad()
def _logprobs(directory: Path) -> list[list[float]]:
    """Of each prompt's tokens but the first, computed by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    scored: list[list[float]] = []
    for prompt in PROMPTS:
        tokens = torch.tensor(prompt)
        logprobs = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
        scored.append(logprobs.gather(1, tokens[1:, None])[:, 0].tolist())
    return scored


def check_pulls_in_a_process(directory: Path, dtype: str = "float32") -> None:
    """To be called in a process of its own, because the classes of transformers stay changed."""
    with contextlib.closing(engine_factory()) as factories:
        check_pulls(directory, dtype, next(factories))


def test_pulls_equal_a_fresh_engine(tmp_path: Path, build_engine: EngineFactory) -> None:
    check_pulls(MODELS["gemma2"][1](tmp_path / "model"), "float32", build_engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CODE_OF_TRANSFORMERS)
def test_pulls_of_a_model_served_by_transformers(tmp_path: Path, name: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    process = multiprocessing.get_context("spawn").Process(target=check_pulls_in_a_process, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0
