"""PPO (https://arxiv.org/abs/1707.06347) with a critic and a reference: a token's advantage is what nobody expected.

Copy this page to write your own loop. `warmup_steps` are the policy's: time for the critic to learn what to expect.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.meshes.launch import Launcher
from controller.runs.checkpoints import Checkpoints
from controller.runs.console import Console
from controller.runs.loop_config import RolloutLoopConfig
from controller.runs.report import Report
from controller.runs.rollout_source import RolloutSource
from rl.algorithms.actor_critic import PPOParams, merge_minibatches, minibatches, ppo_advantages
from rl.algorithms.metrics import PhaseClock
from rl.checks import check_at_least
from rl.losses import get_loss
from rl.losses.reduction import token_mean
from rl.rollouts.episodes import rollout_to_datum, with_tokens
from rl.runs.folder import RunFolder
from rl.schedules import constant, warmup
from rl.types import ForwardBackwardOutput, OptimStepOutput
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(RolloutLoopConfig):
    """A recipe of this loop. The critic needs `head="value"`; the reference is laid out as `trainer` is."""

    critic: TrainerConfig
    group_size: int
    critic_learning_rate: float
    ppo: PPOParams
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    critic_loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    """Options of the losses "ppo" and "value"."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        check_at_least(1, group_size=self.group_size)
        if self.critic.head != "value":
            raise ValueError(f"critic.head is {self.critic.head!r}; a critic needs 'value'")
        self.adam(self.critic_learning_rate)
        get_loss("ppo", self.loss_config)
        get_loss("value", self.critic_loss_config)


async def run(config: PPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains policy and critic and reports every step. Every process it starts has ended when it returns or raises."""
    report = Report(folder, console, config.num_steps)
    source = RolloutSource(config, report)
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    report.phase("starting trainer, critic, reference and generator")
    async with Launcher(report.log_dir) as launcher:
        trainer, critic, reference, generator = await asyncio.gather(
            launcher.trainer(source.model, config.trainer, generator=config.generator),
            launcher.trainer(source.model, config.critic, name="critic"),
            launcher.trainer(source.model, config.trainer, name="reference"),
            launcher.generator(source.model, config.generator),
        )
        checkpoints = Checkpoints(report, config, policy=trainer, critic=critic)
        first_step = await checkpoints.resume()
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(first_step, config.num_steps + 1):
            if (step - 1) % config.evaluate_every == 0:
                report.evaluation(step - 1, await source.evaluate(generator))
            clock = PhaseClock()
            with clock("generate"):
                groups = await source.sample(generator, step, config.group_size)
            if rollouts := with_tokens(groups):
                with clock("forward"):
                    sampled = [rollout_to_datum(rollout, 0.0) for rollout in rollouts]
                    judged, frozen = await asyncio.gather(critic.forward(sampled), reference.forward(sampled))
                rewards = [rollout.reward for rollout in rollouts]
                batch, metrics = ppo_advantages(sampled, rewards, judged.values, frozen.logprobs, config.ppo)
                outputs, updates = list[tuple[ForwardBackwardOutput, ...]](), list[OptimStepOutput]()
                for part in (parts := minibatches(batch, config.ppo, (config.seed, step))):
                    with clock("forward_backward"):
                        policy_step = trainer.forward_backward(part, "ppo", config.loss_config)
                        critic_step = critic.forward_backward(part, "value", config.critic_loss_config)
                        outputs.append(await asyncio.gather(policy_step, critic_step))
                    with clock("optim_step"):
                        policy_step = trainer.optim_step(config.adam(learning_rate(step - 1)), token_mean(part))
                        critic_step = critic.optim_step(config.adam(config.critic_learning_rate), token_mean(part))
                        updates.append((await asyncio.gather(policy_step, critic_step))[0])
                with clock("push"):
                    version = await trainer.push_model_state_dict()
                with clock("pull"):
                    await generator.pull_model_state_dict(version)
                learned, output, losses = merge_minibatches(parts, outputs)
                report.step(step, clock, groups, learned, output, updates[-1], metrics | losses)
            else:
                report.step_without_signal(step, clock, groups, why="no rollout has a sampled token")
            await checkpoints.after_step(step)
        report.evaluation(config.num_steps, await source.evaluate(generator))
        await trainer.export_hf(report.model_dir)
    report.finish()
