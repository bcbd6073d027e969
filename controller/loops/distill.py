"""On-policy distillation: the student samples, the teacher grades every token, and the reverse KL is the advantage.

Copy this page to write your own loop. Unlike distillation on a teacher's texts (use `sft` for that) the student learns
where its own answers lead: https://thinkingmachines.ai/blog/on-policy-distillation. Rewards are only shown.
"""

import asyncio
from dataclasses import dataclass, replace

from controller.meshes.launch import Launcher
from controller.runs.checkpoints import Checkpoints
from controller.runs.console import Console
from controller.runs.loop_config import RolloutLoopConfig
from controller.runs.models import resolve_teacher
from controller.runs.report import Report
from controller.runs.rollout_source import RolloutSource
from rl.advantages.kl import kl_from_generator
from rl.algorithms.distillation import eval_kl, reverse_kl_advantages
from rl.algorithms.metrics import PhaseClock
from rl.checks import check_at_least, check_fraction
from rl.losses.reduction import token_mean
from rl.rollouts.episodes import rollout_to_datum, step_seed, with_tokens
from rl.runs.folder import RunFolder
from rl.schedules import constant, warmup
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig(RolloutLoopConfig):
    """A recipe of this loop; `model` is the student, which samples each problem `group_size` times."""

    teacher: str
    """As `model`; it must have the student's tokenizer."""
    teacher_trainer: TrainerConfig
    """How the teacher is laid out. It is only asked for log-probs, and holds neither gradients nor optimizer state."""
    group_size: int
    discount: float = 0.0
    """0: a token answers for its own divergence only; 1: for that of all that follow."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        check_at_least(1, group_size=self.group_size)
        check_fraction(discount=self.discount)


async def run(config: DistillConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    report = Report(folder, console, config.num_steps)
    rollouts = RolloutSource(config, report)
    teacher_model = resolve_teacher(config.teacher, rollouts.model, report.phase)
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    seeded = replace(rollouts.sampling, seed=step_seed(config.seed, 0))

    async def measure(step: int) -> None:
        kl = await eval_kl(generator, teacher, rollouts.renderer, rollouts.eval_problems, seeded)
        report.measured(step, kl_to_teacher=kl)
        report.evaluation(step, await rollouts.evaluate(generator))

    report.phase("starting trainer, teacher and generator")
    async with Launcher(report.log_dir) as launcher:
        trainer, teacher, generator = await asyncio.gather(
            launcher.trainer(rollouts.model, config.trainer, generator=config.generator),
            launcher.trainer(teacher_model, config.teacher_trainer, name="teacher"),
            launcher.generator(rollouts.model, config.generator),
        )
        checkpoints = Checkpoints(report, config, policy=trainer)
        first_step = await checkpoints.resume()
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(first_step, config.num_steps + 1):
            if (step - 1) % config.evaluate_every == 0:
                await measure(step - 1)
            clock = PhaseClock()
            with clock("generate"):
                groups = await rollouts.sample(generator, step, config.group_size)
            sampled = [rollout_to_datum(rollout, 0.0) for rollout in with_tokens(groups)]
            if sampled:
                with clock("forward"):
                    graded = (await teacher.forward(sampled)).logprobs
                batch = reverse_kl_advantages(sampled, graded, discount=config.discount)
                with clock("forward_backward"):
                    output = await trainer.forward_backward(batch, "importance_sampling")
                with clock("optim_step"):
                    update = await trainer.optim_step(config.adam(learning_rate(step - 1)), token_mean(batch))
                with clock("push"):
                    version = await trainer.push_model_state_dict()
                with clock("pull"):
                    await generator.pull_model_state_dict(version)
                kl = kl_from_generator(sampled, graded)
                report.step(step, clock, groups, batch, output, update, {"kl_to_teacher": kl})
            else:
                report.step_without_signal(step, clock, groups, why="no rollout has a sampled token")
            await checkpoints.after_step(step)

        await measure(config.num_steps)
        await trainer.export_hf(report.model_dir)
    report.finish()
