"""One CPU core: a random model of 64 tokens learns to say even words; for tests of whole runs that take seconds."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

from controller.grpo import GRPOConfig
from generator.config import GeneratorConfig
from rl.envs.procedural import TextProblem, heldout_set, train_stream
from rl.types import SamplingParams
from tests.generator.served_models import served_llama
from tests.tiny_models import VOCAB_SIZE
from trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenWords:
    """Words are numbered; the reward is the fraction of even ones in the answer."""

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return "even words"

    @property
    def stop(self) -> tuple[str, ...]:
        """Answers end by themselves."""
        return ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(_problem, seed, start, count)

    def heldout_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return heldout_set(_problem, count)


def _problem(number: int) -> TextProblem:
    numbers = random.Random(number).choices(range(3, VOCAB_SIZE), k=6)
    prompt = " ".join(f"w{n}" for n in numbers)
    return TextProblem(id=prompt, prompt=prompt, score=even)


def even(completion: str) -> float:
    """Fraction of even words."""
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)


def recipe() -> GRPOConfig:
    """In float32 on one thread, so that it is repeatable to the last bit."""
    model = Path(os.environ["OWNLOOP_TINY_MODEL"])
    if not model.exists():
        served_llama(model, tied=True)
    return GRPOConfig(
        model=str(model),
        env=EvenWords(),
        trainer=TrainerConfig(compute_dtype="float32", max_tokens_per_microbatch=512),
        generator=GeneratorConfig(dtype="float32", max_model_len=64, max_num_seqs=16),
        sampling=SamplingParams(max_tokens=8),
        num_steps=6,
        prompts_per_step=4,
        group_size=4,
        learning_rate=3e-3,
        num_heldout=16,
        evaluate_every=2,
    )
