"""A task that a random model of 64 tokens learns within seconds: to say even words."""

import random
from dataclasses import dataclass

from benchmarks.tiny_models import VOCAB_SIZE
from rl.envs.procedural import TextProblem, eval_set, train_stream


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

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(_problem, count)


def _problem(number: int) -> TextProblem:
    numbers = random.Random(number).choices(range(3, VOCAB_SIZE), k=6)
    prompt = " ".join(f"w{n}" for n in numbers)
    return TextProblem(id=prompt, prompt=prompt, score=even)


def even(completion: str) -> float:
    """Fraction of even words."""
    words = completion.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
