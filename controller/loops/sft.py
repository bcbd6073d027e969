"""SFT: cross-entropy on given completions, with the held-out loss before, during and after training.

Copy this page to write your own loop. Each step divides by its own number of scored tokens, so a token counts the same
in examples of all lengths.
"""

import functools
from dataclasses import replace

from pydantic import PositiveInt

from controller.launching.launcher import Launcher
from controller.runs import Console, Loop, LoopConfig, Run, RunFolder, check_texts_fit, resolve_model
from rl.configuration import AsItIs, NotNegative, configuration
from rl.data.sources import Examples, TrainOn, eval_loss, examples_to_data
from rl.losses import token_mean
from rl.rollouts.evaluation import Evaluation
from rl.rollouts.rendering import Renderer
from rl.schedules import cosine, warmup


@configuration
class SFTConfig(LoopConfig):
    """A recipe of this loop."""

    data: AsItIs[Examples]
    """A source of examples, training and held-out: `rl.data.sources` has a JSONL file and an environment."""
    examples_per_step: PositiveInt
    """Examples that a step learns from; every scored token counts the same."""
    final_learning_rate: NotNegative = 0.0
    """Where the cosine that starts at `learning_rate` ends, after the last step."""
    weight_decay: NotNegative = 0.0
    """AdamW's, decoupled from the gradient."""
    train_on: TrainOn = "completion"
    """Which tokens are learned: the completion and its end, or the prompt's as well."""
    max_tokens: PositiveInt = 2048
    """Longer examples are left out, and counted."""

    def loop(self) -> Loop:
        return train


async def train(config: SFTConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    model, per_step = resolve_model(config.model, run.phase), config.examples_per_step
    schedule = cosine(config.learning_rate, config.final_learning_rate, config.num_steps + 1)
    learning_rate = warmup(schedule, config.warmup_steps)
    to_data = functools.partial(
        examples_to_data, Renderer(model, date=run.began), train_on=config.train_on, max_tokens=config.max_tokens
    )
    eval_data = to_data(config.data.eval_examples(config.num_eval))
    check_texts_fit(config.max_tokens, model, eval_data)

    async def evaluate() -> Evaluation:
        return Evaluation(measurements={"loss": await eval_loss(trainer, eval_data)})

    run.phase("starting trainer")
    async with Launcher(run.log_dir, config.hosts) as launcher:
        trainer = await launcher.trainer(model, config.policy_config)
        async with run.steps(evaluate, policy=trainer) as steps:
            async for step in steps:
                async with run.clock("pack"):
                    batch = to_data(config.data.train_examples(config.seed, run.data.take(per_step), per_step))
                if batch:
                    async with run.clock("forward_backward"):
                        output = await trainer.forward_backward(batch, "cross_entropy")
                    async with run.clock("optim_step"):
                        params = replace(config.optim(learning_rate(step - 1)), weight_decay=config.weight_decay)
                        update = await trainer.optim_step(params, grad_scale=token_mean(batch))
                    run.end_step((), batch, output, update, {"examples_too_long": float(per_step - len(batch))})
                else:
                    run.end_step_without_update(why="every example was longer than max_tokens")

            await trainer.export_hf(run.model_dir)
    run.finish()
