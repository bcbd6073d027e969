"""What the recipes of all loops have in common; each loop adds its own fields."""

from dataclasses import dataclass

from controller.checks import check_sampled_distribution
from generator.config import GeneratorConfig
from rl.check_env import require_env
from rl.checks import check_at_least
from rl.protocols import Env
from rl.types import AdamParams, SamplingParams
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Of every loop."""

    model: str
    """A local Hugging Face directory, or a name that `controller.models` knows."""
    trainer: TrainerConfig
    num_steps: int
    learning_rate: float
    grad_clip_norm: float = 1.0
    num_heldout: int = 200
    evaluate_every: int = 10
    checkpoint_every: int = 0
    """The last step as well; 0 for none. A run goes on from its last one; the trained model is exported in any case."""
    keep_checkpoints: int = 2
    seed: int = 0
    """Decides which training data come, and how they are sampled."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_at_least(
            1,
            num_steps=self.num_steps,
            num_heldout=self.num_heldout,
            evaluate_every=self.evaluate_every,
            keep_checkpoints=self.keep_checkpoints,
        )
        check_at_least(0, checkpoint_every=self.checkpoint_every)
        self.adam(self.learning_rate)

    def adam(self, learning_rate: float) -> AdamParams:
        """The optimizer's parameters for a step with this learning rate."""
        return AdamParams(learning_rate=learning_rate, grad_clip_norm=self.grad_clip_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoopConfig(LoopConfig):
    """Of a loop that samples what it learns from."""

    env: Env
    generator: GeneratorConfig
    sampling: SamplingParams
    """Of training rollouts."""
    prompts_per_step: int
    heldout_samples: int = 1
    """Answers to each held-out problem: one greedy, or several sampled ones with pass@k; training sees none of it."""

    def __post_init__(self) -> None:
        """Raises ValueError as the base does."""
        LoopConfig.__post_init__(self)  # super() does not know a class with slots
        require_env(self.env)
        check_at_least(1, prompts_per_step=self.prompts_per_step, heldout_samples=self.heldout_samples)
        check_sampled_distribution(self.sampling)
