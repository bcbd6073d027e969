"""GRPO (https://arxiv.org/abs/2402.03300), on-policy: sample groups, learn from them once, push the weights, repeat.

Copy this page to write your own loop. Unlike the paper it has no KL term, since every token is trained on once, by the
policy that sampled it, and the loss is averaged over the tokens of the step (DAPO, https://arxiv.org/abs/2503.14476).
"""

from controller.launching.launcher import launch
from controller.runs import Console, GroupLoopConfig, Loop, RolloutSource, Run, RunFolder
from rl.configuration import configuration
from rl.rollouts.episodes import groups_to_data
from rl.schedules import constant, warmup


@configuration
class GRPOConfig(GroupLoopConfig):
    """A recipe of this loop."""

    def loop(self) -> Loop:
        return train


async def train(config: GRPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    source, advantage = RolloutSource(config, run.phase, run.began, run.data), config.advantage_function
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)

    run.phase("starting trainer and generator")
    meshes = launch(source.model, config.policy_config, config.generator_config, run.log_dir, config.hosts)
    async with meshes as (trainer, generator), run.steps(source.evaluate, generator, policy=trainer) as steps:
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        async for step in steps:
            async with run.clock("generate"):
                groups = await source.sample(generator, step, config.group_size)
            batch = await groups_to_data(groups, advantage)
            if batch:
                async with run.clock("forward_backward"):
                    data, scale = config.normalised(batch, groups)
                    output = await trainer.forward_backward(data, config.loss, config.loss_config)
                async with run.clock("optim_step"):
                    params = config.optim(learning_rate(step - 1))
                    update = await trainer.optim_step(params, grad_scale=scale)
                async with run.clock("push"):
                    version = await trainer.push_model_state_dict()
                async with run.clock("pull"):
                    await generator.pull_model_state_dict(version)
                run.end_step(groups, batch, output, update)
            else:
                run.end_step_without_update(groups)

        await trainer.export_hf(run.model_dir)
    run.finish()
