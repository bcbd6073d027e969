"""A guessing game of several turns: find a hidden number from the hints "Higher." and "Lower.".

The model can only do well if it uses the earlier turns. The game is one text with a line per guess. It begins with a
solved game, because a small model continues a pattern better than it follows an instruction.
"""

import random
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from rl.configuration import configuration
from rl.envs.procedural import eval_set, train_stream
from rl.protocols import Done, Observation, Reply
from rl.types import Answer

_EXAMPLE = "The number is between 131 and 138.\nGuess: 135\nLower.\nGuess: 133\nHigher.\nGuess: 134\nRight!\n\n"
_TURN_COST = 0.2  # so that the last of at most 5 guesses still has a reward above 0


@configuration
class GuessNumber:
    """Guess a number in few turns. Reward 1 for a right first guess, 0.2 less per further guess, 0 if never right."""

    span: Annotated[int, Field(ge=2)] = 8
    """Size of the range that contains the number, at least 2. Ranges begin anywhere from 10 to 490."""
    max_turns: Annotated[int, Field(ge=1, le=5)] = 4
    """Most guesses per game, between 1 and 5."""

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
    """A game: a range and the number in it to find."""

    low: int
    high: int
    number: int
    max_turns: int

    @property
    def id(self) -> str:
        """Number and range."""
        return f"{self.number} between {self.low} and {self.high}"

    @property
    def prompt(self) -> str:
        """A solved game, then the beginning of this game."""
        return f"{_EXAMPLE}The number is between {self.low} and {self.high}.\nGuess: "

    def start(self) -> "Game":
        """See `rl.protocols.Problem`."""
        return Game(self)


def _range(hidden: HiddenNumber) -> str:
    """The prompt's range. Splitting by it keeps games with the same prompt, but another number, on the same side."""
    return f"{hidden.low} to {hidden.high}"


class Game:
    """One attempt at a game."""

    def __init__(self, hidden: HiddenNumber) -> None:
        """Starts without a guess."""
        self._hidden = hidden
        self._num_guesses = 0

    def reply(self, completion: str) -> Reply:
        """Replies higher or lower until the guess is right or there are no turns left."""
        self._num_guesses += 1
        match = re.fullmatch(r"\s*(\d{1,9})[\s.!]*", Answer.read(completion).content)
        guess = int(match[1]) if match else None
        if guess == self._hidden.number:
            reward = 1 - _TURN_COST * (self._num_guesses - 1)
            return Done(reward=reward, metrics={"found": 1.0, "guesses": float(self._num_guesses)})
        if self._num_guesses == self._hidden.max_turns:
            return Done(reward=0.0, metrics={"found": 0.0, "guesses": float(self._num_guesses)})
        hint = "Say a number." if guess is None else "Higher." if guess < self._hidden.number else "Lower."
        # The hint does not begin with a line break: the model has sampled it, as the stop string of its guess.
        return Observation(messages=f"{hint}\nGuess: ")
