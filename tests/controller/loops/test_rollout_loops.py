"""accumulate, distill and ppo with a tiny model, their meshes in one process."""

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.loops import accumulate, ppo
from controller.loops.accumulate import AccumulateConfig
from controller.loops.ppo import PPOConfig
from controller.runs.console import Console
from controller.runs.folder import RunFolder
from controller.runs.loop_config import RolloutLoopConfig
from controller.runs.recording import read_recording
from generator.config import GeneratorConfig
from ownloop_shelf import distill
from ownloop_shelf.distill import DistillConfig
from ownloop_shelf.distillation import Lesson
from rl.advantages import ADVANTAGES
from rl.algorithms.actor_critic import PPOParams
from rl.data.sources import text_to_datum
from rl.losses import token_mean
from rl.rollouts.episodes import group_to_data
from rl.schedules import adapted_to_kl
from rl.tiny_models import VOCAB_SIZE
from rl.tiny_tasks import EvenWords
from rl.types import AdamParams, Group, SamplingParams
from tests.generator.served_models import served_llama
from tests.trainer.engine_trainer import EngineTrainer
from trainer.config import TrainerConfig

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

TRAINER = TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512)
TOLERANCE = 1e-6


def _options(model: Path, **options: Any) -> dict[str, Any]:
    """What the three recipes have in common."""
    return {
        "model": str(model),
        "env": EvenWords(),
        "trainer": TRAINER,
        "generator": GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=64),
        "sampling": SamplingParams(max_tokens=8),
        "num_eval": 32,
        **options,
    }


def _run(loop: Any, config: RolloutLoopConfig, path: Path) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The rows of the optimizer steps and those of the evaluations."""
    folder = RunFolder(path, config)
    asyncio.run(loop.train(config, folder, Console(io.StringIO())))
    assert AutoModelForCausalLM.from_pretrained(path / "model").config.vocab_size == VOCAB_SIZE
    rows = folder.metrics()
    return [row for row in rows if "grad_norm" in row], [row for row in rows if "eval_reward" in row]


def _recorded_groups(run: Path, step: int) -> Sequence[Group]:
    """The groups that a step was trained on, as they were recorded."""
    return read_recording(run / "rollouts")[step]


def _parameters(trainer: EngineTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.engine.hf_parameters()}


@pytest.mark.slow  # however a batch is cut: plugins/doctors/tests/test_engine_contract.py
def test_accumulated_batches_are_one_batch_of_their_union(tmp_path: Path) -> None:
    """Every step of a run, done again by an engine from the checkpoint before, with all its data in one call."""
    model, run = served_llama(tmp_path / "model", tied=True), tmp_path / "run"
    config = AccumulateConfig(
        **_options(model),
        num_steps=3,
        prompts_per_step=3,
        group_size=4,
        tokens_per_step=150,
        learning_rate=1e-4,
        warmup_steps=1,
        kl_target=1e-8,
        evaluate_every=3,
        checkpoint_every=1,
        keep_checkpoints=4,
    )
    steps, evaluations = _run(accumulate, config, run)
    assert [row["step"] for row in evaluations] == [0, 3]
    assert [row["policy_version"] for row in steps] == [1, 2, 3]
    assert all(2 <= row["rollout_batches"] <= 8 for row in steps)

    learning_rate, engine = config.learning_rate / 2, EngineTrainer(model, per_microbatch=100)
    for row in steps:
        step = int(row["step"])
        groups = _recorded_groups(run, step)
        assert len(groups) == 3 * row["rollout_batches"]
        union = [datum for group in groups for datum in group_to_data(group, ADVANTAGES[config.advantage])]
        num_tokens = sum(datum.num_loss_tokens for datum in union)
        of_last_batch = [d for group in groups[-3:] for d in group_to_data(group, ADVANTAGES[config.advantage])]
        assert num_tokens - sum(datum.num_loss_tokens for datum in of_last_batch) < 150 <= num_tokens
        assert row["learning_rate"] == pytest.approx(learning_rate)
        learning_rate = adapted_to_kl(learning_rate, row["kl_after"], target=1e-8, highest=1e-4)

        before = _parameters(engine)
        asyncio.run(engine.forward_backward(union, config.loss))
        grads = {name: p.grad.abs() for name, p in engine.engine.hf_parameters() if p.grad is not None}
        update = asyncio.run(engine.optim_step(config.optim(row["learning_rate"]), grad_scale=token_mean(union)))
        assert update.grad_norm == pytest.approx(row["grad_norm"], rel=1e-5)
        ours = _parameters(engine)
        asyncio.run(engine.load_checkpoint(run / "checkpoints" / f"step-{step:05d}" / "policy"))
        theirs = _parameters(engine)
        assert max(float((ours[name] - before[name]).abs().max()) for name in ours) > 20 * TOLERANCE
        for name in ours:
            # AdamW divides by the gradient's size, so where that is near zero the order of a sum decides.
            rounding = 1e-6 * grads[name].max() / grads[name].clamp_min(1e-30)
            allowed = TOLERANCE + row["learning_rate"] * rounding.clamp_max(1.0)
            assert ((ours[name] - theirs[name]).abs() <= allowed).all(), name
            assert (rounding < 0.01).float().mean() > 0.9, name
    assert steps[-1]["learning_rate"] < config.learning_rate / 2  # the target is far below what such steps bring about


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
        **_options(model),
        teacher=str(tmp_path / "teacher"),
        teacher_trainer=TRAINER,
        num_steps=20,
        prompts_per_step=16,
        group_size=4,
        learning_rate=3e-3,
        evaluate_every=20,
    )
    steps, evaluations = _run(distill, config, tmp_path / "run")
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
        **_options(model),
        teacher="self",
        teacher_trainer=TRAINER,
        lesson=Lesson(divergence="forward_kl", words=4, hint=hint, hint_text="{hint}"),  # type: ignore[arg-type]
        num_steps=2,
        prompts_per_step=4,
        group_size=4,
        learning_rate=1e-3,
        evaluate_every=2,
    )
    steps, _ = _run(distill, config, tmp_path / "run")
    assert [row["policy_version"] for row in steps] == [1, 2]
    assert all(row["kl_to_teacher"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert all((row["graded_fraction"] == 1) == (hint == "answer") for row in steps)


def test_ppo_learns_with_its_critic_and_its_reference(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = PPOConfig(
        **_options(model),
        critic=replace(TRAINER, head="value"),
        num_steps=12,
        prompts_per_step=16,
        group_size=4,
        learning_rate=2e-3,
        warmup_steps=3,
        critic_learning_rate=5e-3,
        ppo=PPOParams(kl_coef=0.02, minibatches_per_epoch=4, num_epochs=2),
        loss_config={"importance_cap": 2.0},  # with which the loss clips the ratio to the policy before the step
        critic_loss_config={"clip_range": 0.0},
        evaluate_every=12,
    )
    steps, evaluations = _run(ppo, config, tmp_path / "run")
    assert [row["policy_version"] for row in steps] == [8 * step for step in range(1, 13)]
    assert [row["learning_rate"] for row in steps] == pytest.approx([0.5e-3, 1e-3, 1.5e-3] + [2e-3] * 9)
    assert abs(steps[0]["kl_reference"]) < 1e-6  # policy and reference are one
    assert steps[-1]["kl_reference"] > 0.01
    assert all(0 < row["clipped_tokens"] < 0.5 for row in steps)
    assert all(row["capped_tokens"] == 0 for row in steps)
    assert (steps[0]["value_mean"], steps[0]["explained_variance"]) == (0, 0)  # a critic that knows nothing yet
    assert steps[-1]["critic_loss"] < 0.5 * steps[0]["critic_loss"]
    assert steps[-1]["value_mean"] == pytest.approx(steps[-1]["reward_mean"], abs=0.25)
    assert evaluations[1]["eval_reward_low"] > evaluations[0]["eval_reward_high"]


def test_a_users_mistakes_are_told_before_any_process_starts(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    other = served_llama(tmp_path / "other", tied=True)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w60"], words["w61"] = words["w61"], words["w60"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    common = _options(model, num_steps=2, prompts_per_step=2, learning_rate=1e-3)
    distilled = DistillConfig(**common, teacher=str(other), teacher_trainer=TRAINER, group_size=1)

    def refused(loop: Any, config: RolloutLoopConfig, message: str) -> None:
        folder = RunFolder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", config)
        with pytest.raises(ValueError, match=message):
            asyncio.run(loop.train(config, folder, Console(io.StringIO())))
        assert not list(folder.logs.iterdir())

    refused(
        distill, distilled, r"teacher .*other has another tokenizer than the student .*model: 2 of 64 tokens differ"
    )
    refused(distill, replace(distilled, teacher="runs/none/model"), r"teacher: model 'runs/none/model' is neither a")
    refused(
        distill, replace(distilled, sampling=SamplingParams(max_tokens=60)), r"the prompt of problem .* has \d+ tokens"
    )
    with pytest.raises(ValueError, match=r"[Ee]nv"):
        replace(distilled, env=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"teacher is 'self' and lesson.hint is 'none'"):
        replace(distilled, teacher="self")
    with pytest.raises(ValueError, match=r"evaluation is 'beside'; in this loop it must be one of \('between',\)"):
        replace(distilled, evaluation="beside")
    with pytest.raises(ValueError, match=r"sampling.temperature is 0.0; training rollouts need at least 0.01"):
        replace(distilled, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    actor_critic: dict[str, Any] = {**common, "group_size": 1, "critic_learning_rate": 1e-3, "ppo": PPOParams()}
    with pytest.raises(ValueError, match=r"critic.head is 'lm'; a critic needs 'value'"):
        PPOConfig(**actor_critic, critic=TRAINER)
    accumulated = AccumulateConfig(**common, group_size=2, tokens_per_step=10, kl_target=0.1)
    for wrong, message in (
        ({"group_size": 1}, r"group_size is 1; it must be at least 2"),
        ({"warmup_steps": -1}, r"warmup_steps is -1; it must be at least 0"),
        ({"num_eval": 10**9}, r"num_eval is 1000000000; it must be in \[1, 100000\]"),
        ({"num_steps": 2.0}, r"AccumulateConfig.num_steps is 2.0; it must be a whole number"),
        ({"sampling": None}, r"AccumulateConfig.sampling is None; it must be a SamplingParams"),
        ({"tokens_per_step": 0}, r"tokens_per_step is 0; it must be above 0"),
        ({"kl_target": -1.0}, r"kl_target is -1.0; it must be above 0"),
        ({"loss": "ppo", "loss_config": {"importance_cap": 2.0}}, r"'ppo' needs the input 'old_logprobs' .* it clips"),
        ({"loss_config": {"kl_coef": 0.1}}, r"needs the input 'reference_logprobs' .* leave kl_coef at 0"),
        ({"advantage": "group_men"}, r"advantage is 'group_men', which is not known; did you mean 'group_mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(accumulated, **wrong)
