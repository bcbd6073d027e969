"""Two tasks with words: saying even words, and reading numbers.

Even words are a task that a randomly initialised model of `rl.tiny_models` learns within seconds. Reading numbers is
one for a small pretrained model: "three thousand six hundred and seventy-two" must be written as 3672. It succeeds
sometimes, and has to learn place value, above all the zeros. The prompt begins with two solved examples, because a
small model continues a pattern better than it follows an instruction.
"""

import functools
import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rl.configuration import Several, configuration
from rl.envs.procedural import TextProblem, eval_set, train_stream

_NUM_WORDS = 64  # w0 to w63, the vocabulary of rl.tiny_models; importing it from there would import transformers
_EVEN = frozenset(f"w{n}" for n in range(0, _NUM_WORDS, 2))
_EXAMPLES = (105, 3672)
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


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


@configuration
class NumberWords:
    """Convert a number from words to digits. Reward 1 for exactly the right digits, 0 for anything else."""

    num_digits: Annotated[Several[Annotated[int, Field(ge=1, le=6)]], Field(min_length=1)] = (3, 4)
    """Possible numbers of digits, each from 1 to 6; every entry is equally likely."""

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return "number words"

    @property
    def stop(self) -> tuple[str, ...]:
        """An answer is one line."""
        return ("\n",)

    def train_problems(self, seed: int, start: int, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count)

    def eval_problems(self, count: int) -> list[TextProblem]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count)

    def _problem(self, number: int) -> TextProblem:
        rng = random.Random(number)
        digits = rng.choice(self.num_digits)
        value = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        lines = [f"{in_words(example)} = {example}\n" for example in _EXAMPLES]
        prompt = "".join(lines) + f"{in_words(value)} = "
        score = functools.partial(_exact, str(value))
        return TextProblem(id=f"number words: {value}", prompt=prompt, score=score, answer=str(value))


def in_words(value: int) -> str:
    """0 to 999,999 in British English: 305 is "three hundred and five"."""
    if value < 20:
        return _UNITS[value]
    if value < 100:
        return _TENS[value // 10] + (f"-{_UNITS[value % 10]}" if value % 10 else "")
    if value < 1000:
        rest = f" and {in_words(value % 100)}" if value % 100 else ""
        return f"{_UNITS[value // 100]} hundred{rest}"
    joint = " and " if 0 < value % 1000 < 100 else " "
    rest = f"{joint}{in_words(value % 1000)}" if value % 1000 else ""
    return f"{in_words(value // 1000)} thousand{rest}"


def _exact(answer: str, completion: str) -> float:
    return float(completion.strip() == answer)
