"""Distillation from a teacher, and of a model from itself, with a tiny model and its meshes in one process."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.runs.folder import RunFolder
from ownloop_shelf import distill
from ownloop_shelf.distill import DistillConfig
from ownloop_shelf.distillation import Objective
from rl.data.sources import text_to_datum
from rl.losses import token_mean
from rl.tiny_models import VOCAB_SIZE
from rl.types import AdamParams, SamplingParams
from tests.controller.loops.lora_runs import adapter_trained, lora_options, sampled_options
from tests.controller.loops.rollout_runs import TRAINER, refused, rollout_options, trained
from tests.generator.served_models import served_llama
from tests.trainer.engine_trainer import EngineTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]


@pytest.mark.slow
def test_distill_brings_the_student_nearer_to_its_teacher(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    teacher, rng = EngineTrainer(model, per_microbatch=64), np.random.default_rng(0)
    for _ in range(12):  # it is taught to answer with even words
        words = rng.integers(3, VOCAB_SIZE, (32, 6)), 4 + 2 * rng.integers(0, 30, (32, 8))
        lesson = [text_to_datum(prompt, answer, "completion") for prompt, answer in zip(*words, strict=True)]
        asyncio.run(teacher.forward_backward(lesson, "cross_entropy"))
        asyncio.run(teacher.optim_step(AdamParams(learning_rate=3e-3), grad_scale=token_mean(lesson)))
    asyncio.run(teacher.export_hf(tmp_path / "teacher"))
    config = DistillConfig(
        **rollout_options(model),
        teacher=str(tmp_path / "teacher"),
        teacher_trainer=TRAINER,
        num_steps=20,
        prompts_per_step=16,
        group_size=4,
        learning_rate=3e-3,
        evaluate_every=20,
    )
    steps, evaluations = trained(distill, config, tmp_path / "run")
    measured = [
        row for row in RunFolder(tmp_path / "run", config, resume=True).metrics() if "eval_kl_to_teacher" in row
    ]
    assert [row["step"] for row in measured] == [0, 20]
    assert measured[1]["eval_kl_to_teacher_high"] < measured[0]["eval_kl_to_teacher_low"]
    assert steps[-1]["kl_to_teacher"] < 0.7 * steps[0]["kl_to_teacher"]
    assert evaluations[1]["eval_reward_low"] > evaluations[0]["eval_reward_high"]  # the teacher's even words
    assert all(row["logprob_mismatch_max"] < 1e-3 for row in steps)  # each step's tokens are of the weights that learn


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["answer", "peer"])
def test_a_student_teaches_itself_over_words(tmp_path: Path, hint: str) -> None:
    """The answer as a hint makes even words more probable; the student learns to be so without it."""
    model = served_llama(tmp_path / "model", tied=True)
    config = DistillConfig(
        **rollout_options(model),
        teacher="self",
        teacher_trainer=TRAINER,
        objective=Objective(divergence="forward_kl", top_k=4, hint=hint, hint_text="{hint}"),  # type: ignore[arg-type]
        num_steps=2,
        prompts_per_step=4,
        group_size=4,
        learning_rate=1e-3,
        evaluate_every=2,
    )
    steps, _ = trained(distill, config, tmp_path / "run")
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert all(row["kl_to_teacher"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert all((row["graded_fraction"] == 1) == (hint == "answer") for row in steps)


@pytest.mark.slow
def test_a_student_may_be_an_adapter(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    options = {**lora_options(model), **sampled_options()}
    config = DistillConfig(**options, teacher=str(model), teacher_trainer=TRAINER)
    steps, _ = adapter_trained(config, model, tmp_path / "run")
    assert all(row["logprob_mismatch_max"] < 1e-4 for row in steps)  # the second step's are of the adapter


def test_a_users_mistakes_are_told_before_any_process_starts(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    other = served_llama(tmp_path / "other", tied=True)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w60"], words["w61"] = words["w61"], words["w60"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = rollout_options(model, num_steps=2, prompts_per_step=2, learning_rate=1e-3)
    config = DistillConfig(**options, teacher=str(other), teacher_trainer=TRAINER, group_size=1)
    runs = (tmp_path / f"run-{number}" for number in range(3))
    refused(distill, config, r"teacher .*other has another tokenizer .*model: 2 of 64 tokens differ", next(runs))
    refused(distill, replace(config, teacher="runs/none/model"), r"teacher: model 'runs/none/model'", next(runs))
    too_long = replace(config, sampling=SamplingParams(max_tokens=60))
    refused(distill, too_long, r"the prompt of problem .* has \d+ tokens", next(runs))
    with pytest.raises(ValueError, match=r"teacher is 'self' and objective.hint is 'none'"):
        replace(config, teacher="self")
    with pytest.raises(ValueError, match=r"evaluation is 'beside'; in this loop it must be one of \('between',\)"):
        replace(config, evaluation="beside")
