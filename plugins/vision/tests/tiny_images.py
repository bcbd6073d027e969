"""Two CPU cores: as `tiny_recipe`, of a tiny vision-language model that is asked for colours."""

from dataclasses import dataclass, replace

from configs import guess_colour_grpo_tinyvl_cpu
from controller.loops.grpo import GRPOConfig
from ownloop_vision.colours import COLOURS, GuessColour
from rl.envs.procedural import TextProblem


@dataclass(frozen=True, slots=True)
class AnyColour:
    """Name colours, right or wrong: a random model does so now and then, and has something to learn from."""

    name = "any colour"
    stop = ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        return [replace(problem, score=_share) for problem in GuessColour().train_problems(seed, start, count)]

    def eval_problems(self, count: int) -> list[TextProblem]:
        return [replace(problem, score=_share) for problem in GuessColour().eval_problems(count)]


def _share(completion: str) -> float:
    return sum(word in COLOURS for word in completion.split()) / 4


def recipe() -> GRPOConfig:
    """In float32 on one thread, so that it is repeatable to the last bit."""
    whole = guess_colour_grpo_tinyvl_cpu.recipe()
    return replace(
        whole,
        env=AnyColour(),
        trainer=replace(whole.trainer, num_threads=1, train_vision=True),
        generator=replace(whole.generator, num_threads=1, max_num_seqs=16),
        prompts_per_step=4,
        group_size=4,
        num_steps=5,
        num_eval=8,
        evaluate_every=3,
        checkpoint_every=2,
    )
