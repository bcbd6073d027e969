"""A guessing game of several turns: find a hidden number from hints that say higher or lower.

The only way to do well is to use what earlier turns said. A solved game comes first, because a small model continues a
pattern better than it follows an instruction; the whole game is one text, a line per guess.
"""

import random
import re
from dataclasses import dataclass

from rl.checks import check_at_least
from rl.envs.procedural import eval_set, train_stream
from rl.protocols import Done, Observation, Reply

_EXAMPLE = "The number is between 131 and 138.\nGuess: 135\nLower.\nGuess: 133\nHigher.\nGuess: 134\nRight!\n\n"
_TURN_COST = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessNumber:
    """Guess a number in few turns. Reward 1 for the first guess, 0.2 less for every further one, 0 if never right."""

    span: int = 8
    """How many numbers it may be, at least 2; they are consecutive and begin anywhere from 10 to 490."""
    max_turns: int = 4
    """Guesses that a game has, between 1 and 5."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_at_least(2, **{"GuessNumber.span": self.span})
        if not 1 <= self.max_turns <= 5:
            raise ValueError(f"GuessNumber.max_turns is {self.max_turns}; it must be between 1 and 5")

    @property
    def name(self) -> str:
        """See `rl.protocols.Env`."""
        return f"guess one of {self.span} numbers in {self.max_turns} turns"

    @property
    def stop(self) -> tuple[str, ...]:
        """A guess is one line."""
        return ("\n",)

    def train_problems(self, seed: int, start: int, count: int) -> list["HiddenNumber"]:
        """See `rl.protocols.Env`."""
        return train_stream(self._problem, seed, start, count, split_by=_range)

    def eval_problems(self, count: int) -> list["HiddenNumber"]:
        """See `rl.protocols.Env`."""
        return eval_set(self._problem, count, split_by=_range)

    def _problem(self, number: int) -> "HiddenNumber":
        rng = random.Random(number)
        low = rng.randint(10, 490)
        high = low + self.span - 1
        return HiddenNumber(low=low, high=high, number=rng.randint(low, high), max_turns=self.max_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenNumber:
    """One number to find."""

    low: int
    high: int
    number: int
    max_turns: int

    @property
    def id(self) -> str:
        """Range and number."""
        return f"{self.number} between {self.low} and {self.high}"

    @property
    def prompt(self) -> str:
        """A solved game, and the beginning of this one."""
        return f"{_EXAMPLE}The number is between {self.low} and {self.high}.\nGuess: "

    def start(self) -> "Game":
        """See `rl.protocols.Problem`."""
        return Game(self)


def _range(hidden: HiddenNumber) -> str:
    """What a player sees before the first guess: a range is in one split, whichever of its numbers is hidden."""
    return f"{hidden.low} to {hidden.high}"


class Game:
    """One attempt."""

    def __init__(self, hidden: HiddenNumber) -> None:
        """No guess has been made."""
        self._hidden = hidden
        self._num_guesses = 0

    def reply(self, completion: str) -> Reply:
        """Says higher or lower until the guess is right or there are no more."""
        self._num_guesses += 1
        match = re.fullmatch(r"\s*(\d{1,9})[\s.!]*", completion)
        guess = int(match[1]) if match else None
        if guess == self._hidden.number:
            reward = 1 - _TURN_COST * (self._num_guesses - 1)
            return Done(reward=reward, metrics={"found": 1.0, "guesses": float(self._num_guesses)})
        if self._num_guesses == self._hidden.max_turns:
            return Done(reward=0.0, metrics={"found": 0.0, "guesses": float(self._num_guesses)})
        hint = "Say a number." if guess is None else "Higher." if guess < self._hidden.number else "Lower."
        # The stop string that ended the line is one of the model's own tokens.
        return Observation(messages=f"{hint}\nGuess: ")
