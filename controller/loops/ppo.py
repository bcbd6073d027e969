"""PPO (https://arxiv.org/abs/1707.06347) with a critic and a reference.

Copy this page to write your own loop. `warmup_steps` are the policy's: time for the critic to learn what to expect.
"""

import asyncio
from dataclasses import field

from controller.launching.launcher import Launcher
from controller.runs import Console, Loop, LossConfig, RolloutLoopConfig, RolloutSource, Run, RunFolder
from rl.algorithms.actor_critic import PPOParams, merge_minibatches, minibatches, ppo_advantages, scored
from rl.configuration import NotNegative, configuration
from rl.losses import get_loss, token_mean
from rl.rollouts.episodes import rollout_to_datum, with_tokens
from rl.schedules import constant, warmup
from rl.types import ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig


@configuration
class PPOConfig(RolloutLoopConfig):
    """A recipe of this loop. The critic needs `head="value"`; the reference is laid out like `trainer`."""

    critic: TrainerConfig
    critic_learning_rate: NotNegative
    ppo: PPOParams
    loss_config: LossConfig = field(default_factory=dict[str, float | str])
    critic_loss_config: LossConfig = field(default_factory=dict[str, float | str])
    """Options of the losses "ppo" and "value"."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        if self.critic.head != "value":
            raise ValueError(f"critic.head is {self.critic.head!r}; a critic needs 'value'")
        get_loss("ppo", self.loss_config)
        get_loss("value", self.critic_loss_config)

    def loop(self) -> Loop:
        return train


async def train(config: PPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains policy and critic and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    source = RolloutSource(config, run.phase, run.began, run.data)
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    run.phase("starting trainer, critic, reference and generator")
    async with Launcher(run.log_dir, config.hosts) as launcher:
        trainer, critic, reference, generator = await asyncio.gather(
            launcher.trainer(source.model, config.policy_config, generator=config.generator_config),
            launcher.trainer(source.model, config.placed(config.critic), name="critic"),
            launcher.reference(source.model, config.policy_config),
            launcher.generator(source.model, config.generator_config),
        )
        async with run.steps(source.evaluate, generator, policy=trainer, critic=critic) as steps:
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())
            async for step in steps:
                async with run.clock("generate"):
                    groups = await source.sample(generator, step, config.group_size)
                if rollouts := with_tokens(groups):
                    sampled, rewards = [rollout_to_datum(r, 0.0) for r in rollouts], [r.reward for r in rollouts]
                    async with run.clock("forward"):
                        sampled, values, frozen = await scored(sampled, trainer, critic, reference, config.loss_config)
                    batch, metrics = ppo_advantages(sampled, rewards, values, frozen, config.ppo)
                    outputs, updates = list[tuple[ForwardBackwardOutput, ...]](), list[tuple[OptimStepOutput, ...]]()
                    for part in (parts := minibatches(batch, config.ppo, (config.seed, step))):
                        async with run.clock("forward_backward"):
                            policy_step = trainer.forward_backward(part, "ppo", config.loss_config)
                            critic_step = critic.forward_backward(part, "value", config.critic_loss_config)
                            outputs.append(await asyncio.gather(policy_step, critic_step))
                        async with run.clock("optim_step"):
                            policy_step = trainer.optim_step(config.optim(learning_rate(step - 1)), token_mean(part))
                            critic_step = critic.optim_step(config.optim(config.critic_learning_rate), token_mean(part))
                            updates.append(await asyncio.gather(policy_step, critic_step))
                    async with run.clock("push"):
                        version = await trainer.push_model_state_dict()
                    async with run.clock("pull"):
                        await generator.pull_model_state_dict(version)
                    learned, output, losses = merge_minibatches(parts, outputs)
                    of_policy, of_critic = zip(*updates, strict=True)
                    run.end_step(groups, learned, output, of_policy, metrics | losses, critic=of_critic)
                else:
                    run.end_step_without_update(groups, why="no rollout has a sampled token")
            await trainer.export_hf(run.model_dir)
    run.finish()
