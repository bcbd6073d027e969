"""Casts other than one trainer and one generator, started together and ended together."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from controller.commands.processes import descendants
from controller.launching.launcher import Launcher
from controller.processes.errors import MeshError
from generator.config import GeneratorConfig
from rl.types import AdamParams, Datum, SamplingParams
from tests.generator.served_models import served_llama
from tests.waiting import wait_until
from trainer.config import TrainerConfig

pytestmark = pytest.mark.e2e

TOKENS = np.arange(3, 23)


def _datum() -> Datum:
    return Datum(tokens=TOKENS[:-1], loss_inputs={"target_tokens": TOKENS[1:]})


def _wait_for_the_end(before: list[int]) -> None:
    """Of all processes but those of earlier tests."""
    wait_until(lambda: not set(descendants()) - set(before), "the processes to end")


@pytest.mark.slow  # a whole run: tests/e2e/test_grpo.py; a reference: tests/controller/loops/test_rollout_loops.py
def test_a_policy_its_reference_and_a_generator(tmp_path: Path) -> None:
    model, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    config = TrainerConfig(compute_dtype="float32")
    generating = GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=4)
    before = descendants()
    num_bytes = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())

    async def main() -> None:
        async with Launcher(logs) as launcher:
            trainer, reference, generator = await asyncio.gather(
                launcher.trainer(model, config, generator=generating),
                launcher.trainer(model, config, name="reference"),
                launcher.generator(model, generating),
            )
            with pytest.raises(ValueError, match="version 0 cannot be pulled"):
                await generator.pull_model_state_dict(0)  # nothing was pushed
            await trainer.forward_backward([_datum()], "cross_entropy")
            await trainer.optim_step(AdamParams(learning_rate=0.1))
            new, old = await asyncio.gather(trainer.forward([_datum()]), reference.forward([_datum()]))
            assert np.abs(new.logprobs[0] - old.logprobs[0]).max() > 0.1
            start = time.perf_counter()
            assert await trainer.push_model_state_dict() == 1
            elapsed = time.perf_counter() - start
            await generator.pull_model_state_dict(1)
            sampling = SamplingParams(max_tokens=1, prompt_logprobs=True)
            (completion,) = await generator.generate(TOKENS.tolist(), sampling)
            assert completion.prompt_logprobs is not None
            np.testing.assert_allclose(completion.prompt_logprobs, new.logprobs[0], atol=1e-4)

            with pytest.raises(ValueError, match=r"version 7 .*1"):
                await generator.pull_model_state_dict(7)
            with pytest.raises(ValueError, match="push_model_state_dict: 'reference' was started without a generator"):
                await reference.push_model_state_dict()
            await trainer.forward_backward([_datum()], "cross_entropy")
            update = await trainer.optim_step(AdamParams(learning_rate=0.1))
            assert num_bytes <= update.metrics["push_bytes_per_s"] * elapsed
            await reference.export_hf(tmp_path / "exported")
            assert (tmp_path / "exported" / "config.json").exists()
            names = {file.name for file in logs.iterdir()}
            assert {"trainer-0.log", "reference-0.log", "generator-0.log", "store-0.log"} <= names

    asyncio.run(main())
    _wait_for_the_end(before)


@pytest.mark.slow  # starts a trainer only to end it
def test_a_start_that_fails_ends_the_others(tmp_path: Path) -> None:
    model, logs = served_llama(tmp_path / "model", tied=True), tmp_path / "logs"
    broken = GeneratorConfig(max_model_len=64, engine_args={"attention_backend": "no such backend"})
    trainers: list[asyncio.Task[Any]] = []
    before = descendants()

    async def main() -> None:
        async with Launcher(logs) as launcher:
            trainers.append(launcher.trainer(model, TrainerConfig()))
            await asyncio.gather(*trainers, launcher.generator(model, broken, name="judge"))

    with pytest.raises((MeshError, ValueError)):
        asyncio.run(main())
    assert trainers[0].done()
    _wait_for_the_end(before)
