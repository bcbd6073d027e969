"""Saying even words: a task that a randomly initialised model of `rl.tiny_models` learns within seconds."""

import random
from dataclasses import dataclass

from rl.envs.procedural import TextProblem, eval_set, train_stream

_NUM_WORDS = 64  # w0 to w63, the vocabulary of rl.tiny_models; importing it from there would import transformers
_EVEN = frozenset(f"w{n}" for n in range(0, _NUM_WORDS, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenWords:
    """Words are numbered: w0 to w63. The reward is the fraction of even words in the answer."""

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return "even words"

    @property
    def stop(self) -> tuple[str, ...]:
        """The model's own end token is enough."""
        return ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(_problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(_problem, count)


def _problem(number: int) -> TextProblem:
    numbers = random.Random(number).choices(range(3, _NUM_WORDS), k=6)
    prompt = " ".join(f"w{n}" for n in numbers)
    return TextProblem(id=prompt, prompt=prompt, score=even, answer="w4 w8", wrong_answers=("w3 w8", "w5"))


def even(completion: str) -> float:
    """Fraction of even words; 0 for an empty answer."""
    words = completion.split()
    return sum(word in _EVEN for word in words) / max(len(words), 1)
