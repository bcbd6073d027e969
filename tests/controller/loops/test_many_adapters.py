"""Many adapters over one trainer and one generator: concurrent tasks do what each of them does alone."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controller.handles.adapters import BoundGenerator
from controller.launching.launcher import Launcher
from generator.config import GeneratorConfig, LoRALimits
from rl.lora import LoRAConfig
from rl.protocols import Generator, Trainer
from rl.types import AdamParams, Datum, SamplingParams
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

NUM_ADAPTERS = 8
Step = tuple[list[tuple[int, ...]], float, float, int]
"""Sampled tokens, loss, norm of the gradient, policy version."""


async def _steps(trainer: Trainer, generator: Generator, seed: int) -> list[Step]:
    """Three steps that imitate what was sampled: sample, learn, push, pull."""
    rng, steps = np.random.default_rng(seed), list[Step]()
    for step in range(3):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        prompts = rng.integers(3, 60, (4, 6)).tolist()
        sampling = SamplingParams(max_tokens=6, seed=seed * 10 + step, ignore_eos=True)
        groups = await asyncio.gather(*(generator.generate(prompt, sampling, 2) for prompt in prompts))
        texts = [[*p, *sample.tokens] for p, group in zip(prompts, groups, strict=True) for sample in group]
        assert all(set(sample.versions) == {step} for group in groups for sample in group)
        arrays = [np.array(text) for text in texts]
        batch = [Datum(tokens=text[:-1], loss_inputs={"target_tokens": text[1:]}) for text in arrays]
        output = await trainer.forward_backward(batch, "cross_entropy")
        update = await trainer.optim_step(AdamParams(learning_rate=1e-2), grad_scale=1 / len(batch))
        sampled = [tuple(text[6:]) for text in texts]
        steps.append((sampled, output.metrics["loss"], update.grad_norm, update.policy_version))
    return steps


def _run(tmp_path: Path, body: Any) -> Any:
    """Runs `body(base, generator)` with the trainer of a frozen model and a generator that has room for adapters."""
    model = served_llama(tmp_path / "model", tied=True)
    config = TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=64, lora=LoRAConfig(rank=4))
    room = LoRALimits(max_rank=8, max_adapters=3, max_loaded=16)
    serving = GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=32, lora=room)

    async def main() -> Any:
        async with Launcher(tmp_path / "logs") as launcher:
            _, base, generator = await asyncio.gather(
                launcher.trainer(model, config, generator=serving),
                launcher.reference(model, config),
                launcher.generator(model, serving),
            )
            assert isinstance(generator, BoundGenerator)
            return await body(base, generator.unbound)

    return asyncio.run(main())


def test_a_mistake_with_one_adapter_harms_no_other(tmp_path: Path) -> None:
    async def body(base: Trainer, generator: Generator) -> None:
        good, bad = await asyncio.gather(
            base.adapter("good", LoRAConfig(rank=4)), base.adapter("bad", LoRAConfig(rank=4))
        )
        alone = await base.adapter("alone", LoRAConfig(rank=4))

        async def refused(call: Coroutine[Any, Any, Any], message: str) -> None:
            with pytest.raises(ValueError, match=message):
                await call

        async def mistakes() -> None:
            for _ in range(4):
                await refused(bad.optim_step(AdamParams(learning_rate=1e-2)), "without a gradient")
                await refused(base.adapter("good", LoRAConfig(rank=4)), "good")
                await refused(bad.load_checkpoint(tmp_path / "nowhere"), "nowhere")
                await refused(generator.generate([3], SamplingParams(max_tokens=1), policy="nobody"), "nobody")
                await refused(generator.pull_model_state_dict(9, policy="good"), "version 9 cannot be pulled")
            await bad.drop()
            await refused(bad.zero_grad(), "was dropped")

        disturbed, _ = await asyncio.gather(_steps(good, BoundGenerator(generator, "good"), 1), mistakes())
        assert disturbed == await _steps(alone, BoundGenerator(generator, "alone"), 1)

    _run(tmp_path, body)
