"""accumulate and ppo with a tiny model, their meshes in one process."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from controller.loops import accumulate, ppo
from controller.loops.accumulate import AccumulateConfig
from controller.loops.ppo import PPOConfig
from controller.runs.recording import read_recording
from rl.advantages import ADVANTAGES
from rl.algorithms.actor_critic import PPOParams
from rl.losses import token_mean
from rl.rollouts.episodes import group_to_data
from rl.schedules import adapted_to_kl
from rl.types import Group, SamplingParams
from tests.controller.loops.rollout_runs import TRAINER, refused, rollout_options, trained
from tests.generator.served_models import served_llama
from tests.trainer.engine_trainer import EngineTrainer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]

TOLERANCE = 1e-6


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
        **rollout_options(model),
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
    steps, evaluations = trained(accumulate, config, run)
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


def test_ppo_learns_with_its_critic_and_its_reference(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = PPOConfig(
        **rollout_options(model),
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
    steps, evaluations = trained(ppo, config, tmp_path / "run")
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
    common = rollout_options(model, num_steps=2, prompts_per_step=2, learning_rate=1e-3)
    actor_critic: dict[str, Any] = {**common, "group_size": 1, "critic_learning_rate": 1e-3, "ppo": PPOParams()}
    with pytest.raises(ValueError, match=r"critic.head is 'lm'; a critic needs 'value'"):
        PPOConfig(**actor_critic, critic=TRAINER)
    accumulated = AccumulateConfig(**common, group_size=2, tokens_per_step=10, kl_target=0.1)
    too_long = replace(accumulated, sampling=SamplingParams(max_tokens=60))
    refused(accumulate, too_long, r"the prompt of problem .* has \d+ tokens", tmp_path / "run")
    for wrong, message in (
        ({"env": object()}, r"[Ee]nv"),
        ({"evaluation": "beside"}, r"evaluation is 'beside'; in this loop it must be one of \('between', 'apart'\)"),
        (
            {"sampling": SamplingParams(max_tokens=8, temperature=0.0)},
            r"sampling.temperature is 0.0; training rollouts need at least 0.01",
        ),
        ({"group_size": 1}, r"group_size is 1"),
        ({"warmup_steps": -1}, r"warmup_steps is -1"),
        ({"num_eval": 10**9}, r"num_eval is 1000000000"),
        ({"num_steps": 2.0}, r"AccumulateConfig.num_steps is 2.0"),
        ({"sampling": None}, r"AccumulateConfig.sampling is None"),
        ({"tokens_per_step": 0}, r"tokens_per_step is 0"),
        ({"kl_target": -1.0}, r"kl_target is -1.0"),
        ({"loss": "ppo", "loss_config": {"importance_cap": 2.0}}, r"'ppo' needs the input 'old_logprobs' .* it clips"),
        ({"loss_config": {"kl_coef": 0.1}}, r"needs the input 'reference_logprobs' .* leave kl_coef at 0"),
        ({"advantage": "group_men"}, r"advantage is 'group_men', which is not known; did you mean 'group_mean'"),
        ({"advantage": "nowhere:f"}, r"advantage is 'nowhere:f', which cannot be imported"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(accumulated, **wrong)
