"""Covers controller/loops/grpo.py: trainer and generator, in one process, agree about a model."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest

from configs import grpo_smollm2_cpu
from controller.loops import grpo
from controller.runs.console import Console
from rl.runs.folder import RunFolder
from tests.e2e import tiny_recipe
from tests.generator.served_models import served_qwen2

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process", "smollm2")]


@pytest.mark.parametrize("tied", [True, False])
def test_in_bfloat16_they_agree_about_a_model_with_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    model = served_qwen2(tmp_path / "model", tied=tied)
    monkeypatch.setenv("OWNLOOP_TINY_MODEL", str(model))
    recipe = tiny_recipe.recipe()
    config = replace(
        recipe,
        num_steps=2,
        trainer=replace(recipe.trainer, compute_dtype="bfloat16"),
        generator=replace(recipe.generator, dtype="bfloat16"),
    )
    folder = RunFolder(tmp_path / "run", config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    steps = [row for row in folder.metrics() if "seconds_push" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert all(row["logprob_mismatch_mean"] < 0.05 and row["grad_norm"] > 0 for row in steps)


# `tests/e2e/test_parity.py` shows it for a tiny model; `tests/e2e/test_grpo.py` runs this one in the recipe's dtype.
@pytest.mark.slow
def test_in_float32_trainer_and_generator_compute_the_same(tmp_path: Path) -> None:
    recipe = grpo_smollm2_cpu.recipe()
    config = replace(
        recipe,
        seed=2,  # with it there is something to learn from in both steps
        num_steps=2,
        prompts_per_step=4,
        group_size=4,
        num_eval=2,
        checkpoint_every=0,
        trainer=replace(recipe.trainer, num_threads=1, compute_dtype="float32"),
        generator=replace(recipe.generator, num_threads=1, dtype="float32"),
        sampling=replace(recipe.sampling, max_tokens=6),
    )
    folder = RunFolder(tmp_path / "run", config)
    asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
    steps = [row for row in folder.metrics() if "seconds_push" in row]
    assert [row["policy_version"] for row in steps] == [1, 2]
    for row in steps:  # the second step's tokens were sampled from weights that were pushed
        assert row["logprob_mismatch_max"] <= 1e-4
        assert row["ratio_mean"] == pytest.approx(1, abs=1e-4)
