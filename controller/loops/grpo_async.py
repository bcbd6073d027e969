"""GRPO with rollouts that run ahead: sampling goes on while the trainer learns, under weights a few steps old at most.

Producer: a task per group of rollouts, in a `RolloutQueue`, which says who waits for whom. Consumer: the loop below,
which trains on finished groups, pushes the new weights and has the generator take them in between two tokens of the
rollouts under way. So a rollout may span versions, and each token knows its own, the one it is corrected for: by a
truncated importance weight (LlamaRL's AIPO, https://arxiv.org/abs/2505.24034). A bound on the staleness is also AReaL's
(https://arxiv.org/abs/2505.24298). Everything else is as in `grpo`; with `max_staleness` 0 so is every number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.loops.grpo import GRPOConfig
from controller.meshes.launch import launch
from controller.runs.checkpoints import Checkpoints
from controller.runs.console import Console
from controller.runs.report import Report
from controller.runs.rollout_source import RolloutSource
from rl.advantages.group_relative import ADVANTAGES
from rl.algorithms.metrics import PhaseClock, num_completion_tokens, policy_staleness
from rl.checks import check_at_least
from rl.rollouts.episodes import group_to_data, rollout_group, step_seed
from rl.rollouts.queue import RolloutQueue
from rl.runs.folder import RunFolder
from rl.schedules import constant, warmup
from rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOAsyncConfig(GRPOConfig):
    """A recipe of this loop: what `grpo` has, and how far rollouts may run ahead."""

    max_staleness: int
    """Most optimizer steps between the policy that sampled a token and the one that trains on it."""
    loss_config: Mapping[str, float | str] = field(default_factory=lambda: {"importance_cap": 2.0})
    """As in `grpo`; by default what the policy that sampled and the trained one differ by is corrected, up to 2."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        GRPOConfig.__post_init__(self)
        check_at_least(0, max_staleness=self.max_staleness)


async def run(config: GRPOAsyncConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    report = Report(folder, console, config.num_steps)
    source, advantage = RolloutSource(config, report), ADVANTAGES[config.advantage]
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)

    report.phase("starting trainer and generator")
    async with launch(source.model, config.trainer, config.generator, report.log_dir) as (trainer, generator):
        checkpoints = Checkpoints(report, config, policy=trainer)
        first_step = await checkpoints.resume()
        version = await trainer.push_model_state_dict()
        await generator.pull_model_state_dict(version)

        async def sample_group(number: int) -> Group:
            step, index = divmod(number, config.prompts_per_step)
            (problem,) = config.env.train_problems(config.seed, number, 1)
            seeded = replace(source.sampling, seed=step_seed(config.seed, step + 1) + index * config.group_size)
            return await rollout_group(generator, source.renderer, problem, seeded, config.group_size)

        steps = range(first_step, config.num_steps + 1)
        queue = RolloutQueue(sample_group, steps, config.prompts_per_step, config.max_staleness, checkpoints.values)
        async with queue as rollouts:
            for step in steps:
                if (step - 1) % config.evaluate_every == 0:
                    report.evaluation(step - 1, await source.evaluate(generator))
                clock = PhaseClock()
                with clock("wait"):
                    groups = await rollouts.take()
                batch = [datum for group in groups for datum in group_to_data(group, advantage)]
                if batch:
                    with clock("forward_backward"):
                        output = await trainer.forward_backward(batch, config.loss, config.loss_config)
                    with clock("optim_step"):
                        adam = config.adam(learning_rate(step - 1))
                        update = await trainer.optim_step(adam, grad_scale=1 / num_completion_tokens(groups))
                    staleness = policy_staleness(groups, version)
                    with clock("push"):
                        version = await trainer.push_model_state_dict()
                    with clock("pull"):
                        await generator.pull_model_state_dict(version, mode="inflight")
                    report.step(step, clock, groups, batch, output, update, staleness)
                else:
                    report.step_without_signal(step, clock, groups)
                rollouts.advance()
                await checkpoints.after_step(step, **rollouts.state())

        report.evaluation(config.num_steps, await source.evaluate(generator))
        await trainer.export_hf(report.model_dir)
    report.finish()
