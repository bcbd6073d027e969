"""A run's rollouts: which problems come at which step, how they are sampled, and how held-out ones are answered."""

from dataclasses import replace

from controller.runs.loop_config import RolloutLoopConfig
from controller.runs.models import resolve_model
from controller.runs.preflight import check_prompts_fit
from controller.runs.report import Report
from rl.protocols import Generator
from rl.rollouts.episodes import rollout_groups, step_seed
from rl.rollouts.evaluation import Evaluation, eval_sampling, evaluate
from rl.rollouts.rendering import Renderer
from rl.types import Group


class RolloutSource:
    """What a recipe says of rollouts, checked and ready to use."""

    def __init__(self, config: RolloutLoopConfig, report: Report) -> None:
        """Raises ValueError for a model that is none, and for prompts that the generator has no room for."""
        self.model = resolve_model(config.model, report.phase)
        """The policy's directory."""
        self.renderer = Renderer(self.model, config.generator.max_model_len)
        self.sampling = replace(config.sampling, stop=config.env.stop)
        self.eval_problems = config.env.eval_problems(config.num_eval)
        """The held-out problems."""
        check_prompts_fit(self.renderer, self.eval_problems, config.generator, self.sampling)
        self._config = config

    async def sample(self, generator: Generator, number: int, num_samples: int) -> list[Group]:
        """Rollout batch `number`, from 1, of the training stream: as many problems as a step has, each tried so often.

        Problems and seeds follow from the run's seed and the number alone, so that a run can go on in the middle.
        """
        count = self._config.prompts_per_step
        problems = self._config.env.train_problems(self._config.seed, (number - 1) * count, count)
        seeded = replace(self.sampling, seed=step_seed(self._config.seed, number))
        return await rollout_groups(generator, self.renderer, problems, seeded, num_samples)

    async def evaluate(self, generator: Generator) -> Evaluation:
        """The recipe's number of answers to each held-out problem."""
        attempts = eval_sampling(self.sampling, self._config.eval_samples)
        return await evaluate(generator, self.renderer, self.eval_problems, *attempts)
