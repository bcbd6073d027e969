"""Many architectures: after a step, a push and a pull, vLLM's log-probs are the trainer's."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams, Datum, SamplingParams
from tests.architectures import MODELS
from tests.generator.engines import EngineFactory
from tests.generator.published import pull
from tests.stores import FakeStore
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.push import WeightPublisher

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = list(range(3, 43))  # longer than every sliding window


def assert_logprobs_are_the_trainers(model: Path, build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step and after it."""
    # vLLM decorates some of transformers' classes, of which the trainer's model, here in the same process, is one.
    monkeypatch.setattr(torch.nn.Module, "do_not_compile", True, raising=False)
    trainer = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32"))
    generator, store = build_engine(model, "float32"), FakeStore()

    async def sample() -> list[Datum]:
        completions = await generator.generate(PROMPT, SamplingParams(max_tokens=24, seed=1), 4)
        data: list[Datum] = []
        for completion in completions:
            tokens = np.array([*PROMPT, *completion.tokens])
            scored = np.arange(1, len(tokens)) >= len(PROMPT)
            logprobs = np.zeros(len(tokens) - 1, np.float32)
            logprobs[scored] = completion.logprobs
            inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "weights": scored.astype(np.float32)}
            data.append(Datum(tokens=tokens[:-1], loss_inputs=inputs))
        return data

    def mismatch(data: list[Datum]) -> float:
        pairs = zip(trainer.forward([data]).logprobs, data, strict=True)
        return max(float(np.abs(found - datum.loss_inputs["logprobs"]).max()) for found, datum in pairs)

    async def main() -> None:
        before = await sample()
        assert mismatch(before) < 1e-4
        trainer.forward_backward([random_batch((30, 40))], get_loss("cross_entropy"))
        trainer.optim_step(AdamParams(learning_rate=1e-2))
        assert mismatch(before) > 1e-2
        await WeightPublisher(torch.float32, store=store).publish(1, trainer.hf_parameters())
        await pull(generator, store, 1)
        assert mismatch(await sample()) < 1e-4

    asyncio.run(main())


@pytest.mark.parametrize("name", MODELS)
def test_a_pulled_step_has_the_trainers_logprobs(
    tmp_path: Path, build_engine: EngineFactory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_logprobs_are_the_trainers(MODELS[name][1](tmp_path / "model"), build_engine, monkeypatch)
