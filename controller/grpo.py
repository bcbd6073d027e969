"""GRPO (https://arxiv.org/abs/2402.03300), on-policy: sample groups, learn from them once, push the weights, repeat.

Copy this page to write your own loop. Unlike the paper it has no KL term, since every token is trained on once, by the
policy that sampled it, and the loss is averaged over the tokens of the step (DAPO, https://arxiv.org/abs/2503.14476).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from controller.checkpoints import Checkpoints
from controller.checks import check_prompts_fit
from controller.console import Console
from controller.launch import launch
from controller.loop_config import RolloutLoopConfig
from controller.models import resolve_model
from controller.report import Report
from rl.advantages import ADVANTAGES
from rl.checks import check_at_least, check_known
from rl.evaluation import evaluate, heldout_sampling
from rl.losses import get_loss
from rl.metrics import PhaseClock, num_completion_tokens
from rl.recording import RunFolder
from rl.rendering import Renderer
from rl.rollouts import group_to_data, rollout_groups, step_seed
from rl.schedules import constant, warmup


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(RolloutLoopConfig):
    """A recipe of this loop."""

    group_size: int
    warmup_steps: int = 0
    advantage: str = "group_mean_std"
    loss: str = "importance_sampling"
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        RolloutLoopConfig.__post_init__(self)
        check_at_least(2, group_size=self.group_size)  # advantages are relative to the group
        check_at_least(0, warmup_steps=self.warmup_steps)
        check_known("advantage", self.advantage, ADVANTAGES)
        get_loss(self.loss, self.loss_config)


async def run(config: GRPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    report = Report(folder, console, config.num_steps)
    model, env = resolve_model(config.model, report.phase), config.env
    renderer, advantage = Renderer(model, config.generator.max_model_len), ADVANTAGES[config.advantage]
    learning_rate = warmup(constant(config.learning_rate), config.warmup_steps)
    sampling = replace(config.sampling, stop=env.stop)
    attempts = heldout_sampling(sampling, config.heldout_samples)
    heldout = env.heldout_problems(config.num_heldout)
    check_prompts_fit(renderer, heldout, config.generator, sampling)

    report.phase("starting trainer and generator")
    async with launch(model, config.trainer, config.generator, report.log_dir) as (trainer, generator):
        checkpoints = Checkpoints(report, config.checkpoint_every, config.keep_checkpoints, policy=trainer)
        first_step = await checkpoints.resume()
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        for step in range(first_step, config.num_steps + 1):
            if (step - 1) % config.evaluate_every == 0:
                report.evaluation(step - 1, await evaluate(generator, renderer, heldout, *attempts))
            clock = PhaseClock()
            problems = env.train_problems(config.seed, (step - 1) * config.prompts_per_step, config.prompts_per_step)
            with clock("generate"):
                seeded = replace(sampling, seed=step_seed(config.seed, step))
                groups = await rollout_groups(generator, renderer, problems, seeded, config.group_size)
            batch = [datum for group in groups for datum in group_to_data(group, advantage)]
            if batch:
                with clock("forward_backward"):
                    output = await trainer.forward_backward(batch, config.loss, config.loss_config)
                with clock("optim_step"):
                    adam = config.adam(learning_rate(step - 1))
                    update = await trainer.optim_step(adam, grad_scale=1 / num_completion_tokens(groups))
                with clock("push"):
                    version = await trainer.push_model_state_dict()
                with clock("pull"):
                    await generator.pull_model_state_dict(version)
                report.step(step, clock, groups, batch, output, update)
            else:
                report.step_without_signal(step, clock, groups)
            await checkpoints.after_step(step)

        report.evaluation(config.num_steps, await evaluate(generator, renderer, heldout, *attempts))
        await trainer.export_hf(report.model_dir)
    report.finish()
