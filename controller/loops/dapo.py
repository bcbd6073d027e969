"""DAPO (https://arxiv.org/abs/2503.14476): GRPO that samples more prompts until a step has enough groups with a signal.

Of the paper's four parts: dynamic sampling is `sample_with_signal`; a completion that the token limit cut off is
punished softly, or not learned from; the loss is averaged over tokens; the recipe's loss is `ppo` with a higher upper
clip. Every batch is learned from once, so that the clip acts on what trainer and generator compute differently alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controller.loops.grpo import GRPOConfig
from controller.meshes.launch import launch
from controller.runs.checkpoints import Checkpoints
from controller.runs.console import Console
from controller.runs.report import Report
from controller.runs.rollout_source import RolloutSource
from rl.advantages.group_relative import ADVANTAGES
from rl.algorithms.dynamic_sampling import sample_with_signal
from rl.algorithms.metrics import PhaseClock
from rl.algorithms.shaping import not_truncated, shape_rewards, soft_overlong_punishment
from rl.checks import check_at_least
from rl.losses.reduction import token_mean
from rl.rollouts.episodes import group_to_data, rollout_groups, step_seed
from rl.runs.folder import RunFolder
from rl.schedules import constant, warmup
from rl.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPOConfig(GRPOConfig):
    """A recipe of this loop: what `grpo` has, and how far to go for a full batch."""

    max_rounds: int = 4
    """Times that a step samples prompts for the groups that it still lacks; what is missing then stays missing."""
    overlong_cache: int = 0
    """Tokens before `sampling.max_tokens` over which a punishment grows to -1; 0 leaves completions that were cut off
    out of what is learned from."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        GRPOConfig.__post_init__(self)
        check_at_least(1, max_rounds=self.max_rounds)
        check_at_least(0, overlong_cache=self.overlong_cache)
        soft_overlong_punishment(self.sampling.max_tokens, self.overlong_cache or 1)


async def run(config: DAPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    report = Report(folder, console, config.num_steps)
    source, advantage = RolloutSource(config, report), ADVANTAGES[config.advantage]
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    punishment = soft_overlong_punishment(config.sampling.max_tokens, config.overlong_cache or 1)

    async def sample(start: int, count: int) -> Sequence[Group]:
        problems = config.env.train_problems(config.seed, start, count)
        seeded = replace(source.sampling, seed=step_seed(config.seed, 0) + start * config.group_size)
        groups = await rollout_groups(generator, source.renderer, problems, seeded, config.group_size)
        return [shape_rewards(group, punishment) for group in groups] if config.overlong_cache else groups

    report.phase("starting trainer and generator")
    async with launch(source.model, config.trainer, config.generator, report.log_dir) as (trainer, generator):
        checkpoints = Checkpoints(report, config, policy=trainer)
        first_step = await checkpoints.resume()
        next_problem: int = checkpoints.values.get("next_problem", 0)
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(first_step, config.num_steps + 1):
            if (step - 1) % config.evaluate_every == 0:
                report.evaluation(step - 1, await source.evaluate(generator))
            clock = PhaseClock()
            with clock("generate"):
                sampled = await sample_with_signal(sample, next_problem, config.prompts_per_step, config.max_rounds)
            next_problem += len(sampled.all)
            keep = (lambda _: True) if config.overlong_cache else not_truncated
            batch = [datum for group in sampled.with_signal for datum in group_to_data(group, advantage, keep=keep)]
            if batch:
                with clock("forward_backward"):
                    output = await trainer.forward_backward(batch, config.loss, config.loss_config)
                with clock("optim_step"):
                    update = await trainer.optim_step(config.adam(learning_rate(step - 1)), token_mean(batch))
                with clock("push"):
                    version = await trainer.push_model_state_dict()
                with clock("pull"):
                    await generator.pull_model_state_dict(version)
                report.step(step, clock, sampled.all, batch, output, update, {"groups_sampled": len(sampled.all)})
            else:
                why = f"none of {len(sampled.all)} groups had something to learn from"
                report.step_without_signal(step, clock, sampled.all, why)
            await checkpoints.after_step(step, next_problem=next_problem)

        report.evaluation(config.num_steps, await source.evaluate(generator))
        await trainer.export_hf(report.model_dir)
    report.finish()
