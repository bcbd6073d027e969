"""On-policy distillation: the student samples, its teachers grade every token, and it learns from the divergence.

Copy this page to write your own loop. Unlike distillation on a teacher's texts (use `sft` for that), the student learns
on its own answers: https://thinkingmachines.ai/blog/on-policy-distillation. Rewards are reported, not learned from.
"""

import asyncio
from dataclasses import field, replace

from controller.handles.offline import OfflineGeneratorConfig
from controller.launching.launcher import Launcher
from controller.runs import Console, Loop, RolloutLoopConfig, RolloutSource, Run, RunFolder
from ownloop_shelf.distillation import Objective, Teachers, eval_kl, resolve_teacher
from rl.configuration import configuration
from rl.losses import token_mean
from rl.rollouts.episodes import step_seed
from rl.rollouts.evaluation import Evaluation
from rl.schedules import constant, warmup
from rl.types import PathOrName
from trainer.config import TrainerConfig


@configuration
class DistillConfig(RolloutLoopConfig):
    """A recipe of this loop; `model` is the student, which samples each problem `group_size` times."""

    teacher: PathOrName
    """Like `model`, with the student's tokenizer; or "self", the student with a hint (`objective.hint`)."""
    teacher_trainer: TrainerConfig
    """How a teacher is laid out. It only computes log-probs, so it holds neither gradients nor optimizer state."""
    objective: Objective = field(default_factory=Objective)
    """Which divergence is learned from, over which tokens, with which hints, and further teachers."""
    evaluations = ("between",)

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        self.objective.check(self.teacher, replays=isinstance(self.generator, OfflineGeneratorConfig))

    def loop(self) -> Loop:
        return train


async def train(config: DistillConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    source, objective = RolloutSource(config, run.phase, run.began, run.data), config.objective
    names = objective.models(config.teacher, source.model, source.eval_problems)
    paths = [resolve_teacher(name, source.model, run.phase) for name in names]
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)

    async def evaluate() -> Evaluation:
        evaluation = await source.evaluate(generator)
        if objective.hint == "peer":  # a single answer has none
            return evaluation
        seeded = replace(source.sampling, seed=step_seed(config.seed, 0))
        kl = await eval_kl(teachers, source.eval_problems, seeded)
        return replace(evaluation, measurements={"kl_to_teacher": kl})

    teacher = config.placed(replace(config.teacher_trainer, frozen=True))
    run.phase("starting trainer, teachers and generator")
    async with Launcher(run.log_dir, config.hosts) as launcher:
        trainer, generator, *frozen = await asyncio.gather(
            launcher.trainer(source.model, config.policy_config, generator=config.generator_config),
            launcher.generator(source.model, config.generator_config),
            *(launcher.trainer(path, teacher, name=f"teacher{i or ''}") for i, path in enumerate(paths)),
        )
        teachers = Teachers(objective, config.teacher, frozen, trainer, generator, source.renderer, source.model)
        async with run.steps(evaluate, policy=trainer) as steps:
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())
            async for step in steps:
                async with run.clock("generate"):
                    groups = await source.sample(generator, step, config.group_size)
                async with run.clock("forward"):
                    graded = await teachers.grade(groups, source.problems)
                if graded.batch:
                    async with run.clock("forward_backward"):
                        output = await trainer.forward_backward(graded.batch, objective.loss)
                    async with run.clock("optim_step"):
                        params = config.optim(learning_rate(step - 1))
                        update = await trainer.optim_step(params, token_mean(graded.sampled))
                    async with run.clock("push"):
                        version = await trainer.push_model_state_dict()
                    async with run.clock("pull"):
                        await generator.pull_model_state_dict(version)
                    run.end_step(groups, graded.batch, output, update, graded.metrics(output))
                else:
                    run.end_step_without_update(groups, why="no rollout has a sampled token and a hint")
            await trainer.export_hf(run.model_dir)
    run.finish()
