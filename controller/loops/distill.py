"""On-policy distillation: the student samples, the teacher grades every token, and the reverse KL is the advantage.

Copy this page to write your own loop. Unlike distillation on a teacher's texts (use `sft` for that), the student learns
on its own answers: https://thinkingmachines.ai/blog/on-policy-distillation. Rewards are reported, not learned from.
"""

import asyncio
from dataclasses import dataclass, replace

from controller.launching.launcher import Launcher
from controller.runs import Console, Loop, RolloutLoopConfig, RolloutSource, Run, RunFolder, TrainerConfig
from rl.advantages import kl_from_generator
from rl.algorithms.distillation import eval_kl, reverse_kl_advantages
from rl.checks import check_fraction
from rl.losses import token_mean
from rl.rollouts.episodes import rollout_to_datum, step_seed, with_tokens
from rl.schedules import constant, warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RolloutLoopConfig):
    """A recipe of this loop; `model` is the student, which samples each problem `group_size` times."""

    teacher: str
    """Like `model`. It must have the student's tokenizer."""
    teacher_trainer: TrainerConfig
    """How the teacher is laid out. It only computes log-probs, so it holds neither gradients nor optimizer state."""
    discount: float = 0.0
    """With 0 a token answers for its own divergence only, with 1 also for the divergence of all tokens after it."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        self._set("teacher_trainer", replace(self.teacher_trainer, frozen=True))
        check_fraction(discount=self.discount)

    def loop(self) -> Loop:
        return train


async def train(config: DistillConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    source = RolloutSource(config, run.phase, run.began)
    teacher_model = source.resolve_teacher(config.teacher)
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    seeded = replace(source.sampling, seed=step_seed(config.seed, 0))

    async def evaluate(step: int) -> None:
        kl = await eval_kl(generator, teacher, source.renderer, source.eval_problems, seeded)
        run.log_measurements(step, kl_to_teacher=kl)
        run.log_evaluation(step, await source.evaluate(generator))

    run.phase("starting trainer, teacher and generator")
    async with Launcher(run.log_dir, config.hosts) as launcher:
        trainer, teacher, generator = await asyncio.gather(
            launcher.trainer(source.model, config.trainer, generator=config.generator),
            launcher.trainer(teacher_model, config.teacher_trainer, name="teacher"),
            launcher.generator(source.model, config.generator),
        )
        async with run.steps(policy=trainer) as steps:
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())
            for step in steps:
                if (step - 1) % config.evaluate_every == 0:
                    await evaluate(step - 1)
                clock = run.begin_step(step)
                with clock("generate"):
                    groups = await source.sample(generator, step, config.group_size)
                if sampled := [rollout_to_datum(rollout, 0.0) for rollout in with_tokens(groups)]:
                    with clock("forward"):
                        graded = (await teacher.forward(sampled)).logprobs
                    batch = reverse_kl_advantages(sampled, graded, discount=config.discount)
                    with clock("forward_backward"):
                        output = await trainer.forward_backward(batch, "importance_sampling")
                    with clock("optim_step"):
                        update = await trainer.optim_step(config.optim(learning_rate(step - 1)), token_mean(batch))
                    with clock("push"):
                        version = await trainer.push_model_state_dict()
                    with clock("pull"):
                        await generator.pull_model_state_dict(version)
                    run.end_step(groups, batch, output, update, {"kl_to_teacher": kl_from_generator(sampled, graded)})
                else:
                    run.end_step_without_update(groups, why="no rollout has a sampled token")
                await run.checkpoint_if_due()

            await evaluate(run.last_step)
            await trainer.export_hf(run.model_dir)
    run.finish()
