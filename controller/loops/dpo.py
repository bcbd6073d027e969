"""DPO (https://arxiv.org/abs/2305.18290): learn from pairs of answers which one is better, by their log-probs alone.

Copy this page to write your own loop. IPO, KTO, ORPO, SimPO and a reward model's are losses of it. The reference is the
policy before training: it scores all pairs before the first update. `rl/algorithms/preferences.py` has the gradient.
"""

import functools
from typing import Annotated

from pydantic import PositiveInt

from controller.launching.launcher import Launcher
from controller.runs import Console, Loop, LoopConfig, Run, RunFolder, check_texts_fit, resolve_model
from rl.algorithms import preferences as pairs
from rl.configuration import AsItIs, NotNegative, Positive, configuration, one_of
from rl.data.sources import Preferences
from rl.rollouts.evaluation import Evaluation
from rl.rollouts.rendering import Renderer
from rl.schedules import linear, warmup
from rl.types import Datum


@configuration
class DPOConfig(LoopConfig):
    """A recipe of this loop. The learning rate falls in a straight line, which reaches 0 after the last step."""

    data: AsItIs[Preferences]
    """A source of pairs, training and held-out: `rl.data.sources` has a JSONL file and an environment."""
    pairs_per_step: PositiveInt
    """Preference pairs that a step learns from; each counts the same."""
    loss: Annotated[str, one_of(lambda: pairs.PAIR_LOSSES)] = "dpo"
    """A row of `rl.algorithms.preferences.PAIR_LOSSES`."""
    beta: Positive = 0.1
    """How strongly the policy is held to the reference; the scale of the reward in `simpo`, and lambda in `orpo`."""
    margin: NotNegative = 0.0
    """By how much a chosen answer's implicit reward shall exceed the rejected one's, in `dpo` and `simpo`."""
    max_tokens: PositiveInt = 2048
    """A pair is left out, and counted, if either answer makes it longer than this."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        LoopConfig.__post_init__(self)
        pairs.PairLoss(name=self.loss, beta=self.beta, margin=self.margin, head=self.trainer.head)

    def loop(self) -> Loop:
        return train


async def train(config: DPOConfig, folder: RunFolder, console: Console) -> None:
    """Trains a model and reports every step. Every process it starts has ended when it returns or raises."""
    run = Run(config, folder, console)
    model, per_step, limit = resolve_model(config.model, run.phase), config.pairs_per_step, config.max_tokens
    loss = pairs.PairLoss(name=config.loss, beta=config.beta, margin=config.margin, head=config.trainer.head)
    learning_rate = warmup(linear(config.learning_rate, 0.0, config.num_steps + 1), config.warmup_steps)
    to_data = functools.partial(loss.data, Renderer(model, date=run.began), max_tokens=limit)
    check_texts_fit(limit, model, eval_data := to_data(config.data.eval_preferences(config.num_eval)))

    def training_data(step: int) -> list[Datum]:
        return to_data(config.data.train_preferences(config.seed, run.data.start_of(step, per_step), per_step))

    async def evaluate() -> Evaluation:
        scored = await pairs.score_pairs(trainer, eval_data, eval_reference)
        return Evaluation(measurements=loss.measure(scored))

    run.phase("starting trainer")
    async with Launcher(run.log_dir, config.hosts) as launcher:
        trainer = await launcher.trainer(model, config.policy_config)
        numbers, file = run.counted("scoring every pair", range(config.num_steps + 1)), folder.path / "reference.json"
        batches = (training_data(step) if step else eval_data for step in numbers)
        eval_reference, *reference = await pairs.reference_logprobs(trainer, batches, file, loss)
        async with run.steps(evaluate, policy=trainer) as steps:
            async for step in steps:
                run.data.take(per_step)
                async with run.clock("pack"):
                    batch = training_data(step)
                if batch:
                    async with run.clock("forward"):
                        scored = await pairs.score_pairs(trainer, batch, reference[step - 1])
                    async with run.clock("forward_backward"):
                        losses, slopes = loss(scored)
                        output = await trainer.forward_backward(pairs.weight_pairs(batch, slopes), loss.token_loss)
                    async with run.clock("optim_step"):
                        update = await trainer.optim_step(config.optim(learning_rate(step - 1)), 1 / len(losses))
                    metrics = {name: float(m.values.mean()) for name, m in loss.measure(scored).items()}
                    run.end_step((), batch, output, update, {**metrics, "pairs_too_long": per_step - len(losses)})
                else:
                    run.end_step_without_update(why="every pair was longer than max_tokens")
            await trainer.export_hf(run.model_dir)
    run.finish()
