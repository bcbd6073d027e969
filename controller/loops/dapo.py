"""DAPO (https://arxiv.org/abs/2503.14476): GRPO that samples more prompts until a step has enough groups with a signal.

Copy this page to write your own loop. Of the paper's four parts, `sample_with_signal` is dynamic sampling, which sees
the environment's rewards; a completion that the token limit cut off is then punished softly or left out; `normalised`
averages the loss over tokens; and the recipe's loss is `ppo` with a higher upper clip. Each batch is learned from once,
so the clip only acts on the mismatch between trainer and generator.
"""

from pydantic import NonNegativeInt, PositiveInt

from controller.launching.launcher import launch
from controller.runs import Console, GroupLoopConfig, Loop, RolloutSource, Run, RunFolder
from rl.algorithms.shaping import not_truncated, sample_with_signal, shape_rewards, soft_overlong_punishment
from rl.configuration import configuration
from rl.rollouts.episodes import groups_to_data
from rl.schedules import constant, warmup
from rl.types import Group


@configuration
class DAPOConfig(GroupLoopConfig):
    """A recipe of this loop."""

    samples_again = True
    max_rounds: PositiveInt = 4
    """Times that a step samples prompts to replace groups without a signal. Then it uses the groups that it has."""
    overlong_cache: NonNegativeInt = 0
    """Tokens before `sampling.max_tokens` over which a punishment grows to -1. With 0, completions that were cut off
    are not learned from."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        GroupLoopConfig.__post_init__(self)
        soft_overlong_punishment(self.sampling.max_tokens, self.overlong_cache or 1)

    def loop(self) -> Loop:
        return train


async def train(config: DAPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    source, advantage = RolloutSource(config, run.phase, run.began, run.data), config.advantage_function
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    punishment = soft_overlong_punishment(config.sampling.max_tokens, config.overlong_cache or 1)

    async def sample(start: int, count: int) -> list[Group]:
        return await source.sample_problems(generator, start, count, config.group_size)

    def shaped(groups: tuple[Group, ...]) -> list[Group]:
        return [shape_rewards(group, punishment) for group in groups] if config.overlong_cache else [*groups]

    run.phase("starting trainer and generator")
    meshes = launch(source.model, config.policy_config, config.generator_config, run.log_dir, config.hosts)
    async with meshes as (trainer, generator), run.steps(source.evaluate, generator, policy=trainer) as steps:
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        async for step in steps:
            async with run.clock("generate"):
                sampled = await sample_with_signal(sample, run.data.next, config.prompts_per_step, config.max_rounds)
            run.data.take(len(sampled.all))
            keep = (lambda _: True) if config.overlong_cache else not_truncated
            kept = shaped(sampled.with_signal)  # after the filter: a punishment alone is no signal
            batch = await groups_to_data(kept, advantage, keep=keep)
            if batch:
                async with run.clock("forward_backward"):
                    data, scale = config.normalised(batch)
                    output = await trainer.forward_backward(data, config.loss, config.loss_config)
                async with run.clock("optim_step"):
                    update = await trainer.optim_step(config.optim(learning_rate(step - 1)), scale)
                async with run.clock("push"):
                    version = await trainer.push_model_state_dict()
                async with run.clock("pull"):
                    await generator.pull_model_state_dict(version)
                metrics = {"groups_sampled": len(sampled.all), "groups_with_signal": len(kept)}
                run.end_step(shaped(sampled.all), batch, output, update, metrics)
            else:
                run.end_step_without_update(sampled.all, f"{len(sampled.all)} groups had nothing to learn from")

        await trainer.export_hf(run.model_dir)
    run.finish()
