"""Comparing numbers: "Which number is the largest: 47, 83, 19, 62?".

A small pretrained model tends to name the first or the last number. The prompt contains the first words of the answer,
so that the model learns to compare and not to follow a format.
"""

import functools
import random
from typing import Annotated

from pydantic import Field, NonNegativeInt

from rl.configuration import configuration
from rl.envs.procedural import TextProblem, eval_set, train_stream


@configuration
class LargestNumber:
    """Name the largest of several different numbers. Reward 1 for exactly that number, 0 for anything else."""

    count: Annotated[int, Field(ge=2, le=20)] = 4
    """Numbers to compare, between 2 and 20."""
    low: NonNegativeInt = 10
    """Smallest number that may occur, at least 0."""
    high: int = 99
    """Largest number that may occur."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if not self.low <= self.high - self.count:
            raise ValueError(
                f"LargestNumber.low is {self.low} and high is {self.high}; {self.count} different numbers must fit "
                "between them"
            )

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return f"largest of {self.count} numbers"

    @property
    def stop(self) -> tuple[str, ...]:
        """The model's own end token is enough."""
        return ()

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        numbers = random.Random(number).sample(range(self.low, self.high + 1), self.count)
        question = f"Which number is the largest: {', '.join(map(str, numbers))}?"
        prompt = [{"role": "user", "content": question}, {"role": "assistant", "content": "The largest number is "}]
        answer, *wrong = map(str, sorted(numbers, reverse=True))
        score = functools.partial(_exact, max(numbers))
        return TextProblem(id=question, prompt=prompt, score=score, answer=answer, wrong_answers=tuple(wrong))


def _exact(answer: int, completion: str) -> float:
    return float(completion.strip().removesuffix(".") == str(answer))
