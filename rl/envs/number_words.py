"""Reading numbers: "three thousand six hundred and seventy-two" must be written as 3672.

A small pretrained model succeeds sometimes. It has to learn place value, above all the zeros. The prompt begins with
two solved examples, because a small model continues a pattern better than it follows an instruction.
"""

import functools
import random
from dataclasses import dataclass

from rl.checks import check_at_least
from rl.envs.procedural import TextProblem, eval_set, train_stream

_EXAMPLES = (105, 3672)
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberWords:
    """Convert a number from words to digits. Reward 1 for exactly the right digits, 0 for anything else."""

    num_digits: tuple[int, ...] = (3, 4)
    """Possible numbers of digits, each from 1 to 6; every entry is equally likely."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_at_least(1, **{"the number of entries in NumberWords.num_digits": len(self.num_digits)})
        for digits in self.num_digits:
            if not 1 <= digits <= 6:
                raise ValueError(f"NumberWords.num_digits holds {digits}; each must be between 1 and 6")

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
