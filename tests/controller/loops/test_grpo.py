"""Covers controller/loops/grpo.py: trainer and generator, in one process, agree about a model."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest

from configs import grpo_smollm2_cpu
from controller.loops import grpo
from controller.loops.grpo import GRPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.metric_rows import is_timing
from generator.config import GeneratorConfig
from rl.tiny_tasks import EvenWords
from rl.types import SamplingParams
from tests.generator.served_models import served_llama
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process", "smollm2")]


# `tests/e2e/test_grpo.py` runs this one in the recipe's dtype.
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


@pytest.mark.slow
def test_vllm_samples_the_same_with_evaluations_beside(tmp_path: Path) -> None:
    """Requests of an evaluation are in no batch with those of training, so that even rounding is the same."""
    model = served_llama(tmp_path / "model", tied=True)
    runs: list[list[dict[str, float]]] = []
    for evaluation in ("between", "beside"):
        config = GRPOConfig(
            model=str(model),
            env=EvenWords(),
            trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
            generator=GeneratorConfig(dtype="bfloat16", max_model_len=64, max_num_seqs=32),
            sampling=SamplingParams(max_tokens=8),
            evaluation=evaluation,  # type: ignore[arg-type]
            num_steps=4,
            prompts_per_step=4,
            group_size=4,
            learning_rate=3e-3,
            num_eval=48,
            evaluate_every=1,
            checkpoint_every=0,
        )
        folder = RunFolder(tmp_path / evaluation, config)
        asyncio.run(grpo.train(config, folder, Console(io.StringIO())))
        runs.append(folder.metrics())
    between, beside = ([{k: v for k, v in row.items() if not is_timing(k)} for row in run] for run in runs)
    assert sum("seconds_evaluate" in row for row in runs[1]) == 4
    assert beside == between
