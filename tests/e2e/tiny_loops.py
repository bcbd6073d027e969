"""As `tiny_recipe`, of the loop that OWNLOOP_TINY_LOOP names: the other loops that learn from rollouts."""

import dataclasses
import os
from typing import Any

from controller.loops.accumulate import AccumulateConfig
from controller.loops.dapo import DAPOConfig
from controller.loops.grpo_async import GRPOAsyncConfig
from controller.loops.ppo import PPOConfig
from controller.runs.loop_config import RolloutLoopConfig
from rl.algorithms.actor_critic import PPOParams
from tests.e2e import tiny_recipe


def recipe() -> RolloutLoopConfig:
    """In float32 on one thread, so that all but grpo_async are repeatable to the last bit."""
    base = tiny_recipe.recipe()
    common: dict[str, Any] = {each.name: getattr(base, each.name) for each in dataclasses.fields(RolloutLoopConfig)}
    match os.environ["OWNLOOP_TINY_LOOP"]:
        case "grpo_async":
            return GRPOAsyncConfig(**common, max_staleness=2)
        case "dapo":
            return DAPOConfig(**common, overlong_cache=2)
        case "ppo":
            critic = dataclasses.replace(base.trainer, head="value")
            ppo = PPOParams(kl_coef=0.02, minibatches_per_epoch=2, num_epochs=2)
            return PPOConfig(**common, critic=critic, critic_learning_rate=3e-3, ppo=ppo)
        case "accumulate":
            return AccumulateConfig(**common, tokens_per_step=150, kl_target=1e-6)
        case unknown:
            raise ValueError(f"OWNLOOP_TINY_LOOP is {unknown!r}, which is not a loop of this recipe")
