"""GRPO with rollouts that run ahead: the generator continues to sample while the trainer learns.

Copy this page to write your own loop. Producer: one task per group of rollouts, in a `RolloutQueue`, which says who
waits for whom. Consumer: the loop below. It trains on finished groups and pushes the new weights, and the generator
takes them in between two tokens of the rollouts under way. So a rollout may span versions. Each token carries the
version that sampled it and is corrected for it by a truncated importance weight (LlamaRL's AIPO,
https://arxiv.org/abs/2505.24034). The bound on the staleness follows AReaL (https://arxiv.org/abs/2505.24298).
Everything else is as in `grpo`, and with `max_staleness` 0 every number is the same.
"""

from dataclasses import field

from pydantic import NonNegativeInt

from controller.launching.launcher import launch
from controller.loops.grpo import GRPOConfig
from controller.runs import Console, Loop, LossConfig, RolloutSource, Run, RunFolder
from generator.engine_part import recorded_schedule
from rl.algorithms.metrics import policy_staleness
from rl.configuration import AnyPath, Rare, configuration
from rl.rollouts.episodes import groups_to_data
from rl.rollouts.queue import RolloutQueue
from rl.schedules import constant, warmup
from rl.types import Group


@configuration
class GRPOAsyncConfig(GRPOConfig):
    """A recipe of this loop: the fields of `grpo`, and how far rollouts may run ahead."""

    max_staleness: NonNegativeInt
    """Most optimizer steps between the policy that sampled a token and the policy that trains on it."""
    loss_config: LossConfig = field(default_factory=lambda: {"importance_cap": 2.0})
    """As in `grpo`. By default importance weights correct for the staleness, up to a factor of 2."""
    schedule: Rare[AnyPath | None] = None
    """A finished run of this loop to repeat, in the order of its events, with `numerics` "bitwise"."""
    evaluations = ("between", "apart")

    def loop(self) -> Loop:
        return train


async def train(config: GRPOAsyncConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run, recorded = Run(config, folder, console), recorded_schedule(config)
    source, advantage = RolloutSource(config, run.phase, run.began), config.advantage_function
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)

    async def sample_group(number: int) -> Group:
        return await source.sample_group(generator, number, config.group_size)

    run.phase("starting trainer and generator")
    meshes = launch(source.model, config.policy_config, config.generator_config, run.log_dir, config.hosts)
    async with meshes as (trainer, started), run.steps(source.evaluate, started, policy=trainer) as steps:
        generator = started if recorded is None else recorded.repeated_by(started)
        version = await trainer.push_model_state_dict()
        await generator.pull_model_state_dict(version)
        restored, per_step = source.restored(run.restored), config.prompts_per_step
        bound, order = config.max_staleness, None if recorded is None else recorded.order
        queue = RolloutQueue(sample_group, steps.remaining, per_step, bound, restored, source.sampled_as, order)
        async with queue as rollouts:
            async for step in steps:
                async with run.clock("wait"):
                    groups = await rollouts.take()
                batch = await groups_to_data(groups, advantage)
                if batch:
                    async with run.clock("forward_backward"):
                        data, scale = config.normalised(batch, groups)
                        output = await trainer.forward_backward(data, config.loss, config.loss_config)
                    async with run.clock("optim_step"):
                        params = config.optim(learning_rate(step - 1))
                        update = await trainer.optim_step(params, grad_scale=scale)
                    staleness = policy_staleness(groups, version)
                    async with run.clock("push"):
                        version = await trainer.push_model_state_dict()
                    async with run.clock("pull"):
                        await generator.pull_model_state_dict(version, mode="inflight")
                    run.end_step(groups, batch, output, update, staleness)
                else:
                    run.end_step_without_update(groups)
                rollouts.advance()
                run.keep(**rollouts.state())

        await trainer.export_hf(run.model_dir)
    run.finish()
