"""accumulate and ppo with a tiny model, their meshes in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.loops import accumulate, ppo
from controller.loops.accumulate import AccumulateConfig
from controller.loops.ppo import PPOConfig
from rl.algorithms.actor_critic import PPOParams
from rl.types import SamplingParams
from tests.controller.loops.rollout_runs import TRAINER, refused, rollout_options, trained
from tests.generator.served_models import served_llama

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("in_process")]


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
