"""GRPO over as many rollout batches as it takes: a step samples until enough tokens have an advantage.

Copy this page to write your own loop. Gradients add up over batches of unknown size and are divided once, by the number
of tokens there turned out to be. The learning rate falls after a step that moved the policy further than `kl_target`.
"""

from pydantic import PositiveInt

from controller.launching.launcher import launch
from controller.runs import Console, GroupLoopConfig, Loop, RolloutSource, Run, RunFolder
from rl.advantages import kl_from_generator
from rl.algorithms.metrics import merge_outputs
from rl.configuration import Positive, configuration
from rl.rollouts.episodes import groups_to_data
from rl.schedules import adapted_to_kl, constant, warmup
from rl.types import Datum, ForwardBackwardOutput, Group

MAX_BATCHES_PER_STEP = 16  # a step ends after this many rollout batches, however few tokens have an advantage


@configuration
class AccumulateConfig(GroupLoopConfig):
    """A recipe of this loop. A rollout batch has `prompts_per_step` prompts; `learning_rate` is the highest."""

    tokens_per_step: PositiveInt
    """A step adds rollout batches until at least this many tokens have an advantage."""
    kl_target: Positive
    """KL(generator || policy) per token that a step should bring about, measured on its last batch."""
    evaluations = ("between", "apart")
    samples_again = True

    def loop(self) -> Loop:
        return train


async def train(config: AccumulateConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run, limit = Run(config, folder, console), config.sampling.max_tokens
    source, advantage = RolloutSource(config, run.phase, run.began, run.data), config.advantage_function
    highest = warmup(constant(config.learning_rate), config.warmup_steps)
    run.phase("starting trainer and generator")
    meshes = launch(source.model, config.policy_config, config.generator_config, run.log_dir, config.hosts)
    async with meshes as (trainer, generator), run.steps(source.evaluate, generator, policy=trainer) as steps:
        # A fork may have a lower `learning_rate` than the run that saved this one.
        learning_rate: float = min(run.restored.get("learning_rate", highest(0)), highest(run.last_step))
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        async for step in steps:
            groups, batch, outputs = list[Group](), list[Datum](), list[ForwardBackwardOutput]()
            for number in range((step - 1) * MAX_BATCHES_PER_STEP + 1, step * MAX_BATCHES_PER_STEP + 1):
                async with run.clock("generate"):
                    new = await source.sample(generator, number, config.group_size)
                async with run.clock("pack"):
                    data = await groups_to_data(new, advantage)
                if data:
                    async with run.clock("forward_backward"):
                        part, _ = config.normalised(data, length=limit)
                        outputs.append(await trainer.forward_backward(part, config.loss, config.loss_config))
                groups, batch = groups + new, batch + data
                if sum(datum.num_loss_tokens for datum in batch) >= config.tokens_per_step:
                    break
            if batch:
                async with run.clock("optim_step"):
                    _, scale = config.normalised(batch, length=limit)
                    update = await trainer.optim_step(config.optim(learning_rate), scale)
                async with run.clock("forward"):
                    latest = batch[-len(outputs[-1].logprobs) :]
                    kl = kl_from_generator(latest, (await trainer.forward(latest)).logprobs)
                    if not update.skipped:  # a skipped step moved nothing, at any learning rate
                        learning_rate = adapted_to_kl(learning_rate, kl, target=config.kl_target, highest=highest(step))
                async with run.clock("push"):
                    version = await trainer.push_model_state_dict()
                async with run.clock("pull"):
                    await generator.pull_model_state_dict(version)
                metrics = {"kl_after": kl, "rollout_batches": len(groups) / config.prompts_per_step}
                run.end_step(groups, batch, merge_outputs(outputs), update, metrics)
            else:
                run.end_step_without_update(groups)
            run.keep(learning_rate=learning_rate)
        await trainer.export_hf(run.model_dir)
    run.finish()
