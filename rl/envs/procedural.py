"""What procedurally generated environments share: problems by number, and a split that cannot leak.

Whether a problem is held out is a property of its text, not of when or how often it was drawn: the same problem is on
the same side in every stream, run and process.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rl.protocols import Done, Problem, Prompt

EVAL_FRACTION = 0.1
_ATTEMPTS_PER_PROBLEM = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProblem:
    """A single-turn problem: a prompt with a scoring function of the answer's text."""

    id: str
    prompt: Prompt
    score: Callable[[str], float]
    answer: str | None = None
    """A completion that is right, where one is known."""
    wrong_answers: tuple[str, ...] = ()
    """Completions that are wrong but not far off, where some are known."""

    def start(self) -> "TextProblem":
        """There is nothing to keep track of."""
        return self

    def reply(self, completion: str) -> Done:
        """The first answer is the last."""
        return Done(reward=self.score(completion))


P = TypeVar("P", bound=Problem)


def _id(problem: Problem) -> str:
    return problem.id


def train_stream(
    make: Callable[[int], P], seed: int, start: int, count: int, *, split_by: Callable[[P], str] = _id
) -> list[P]:
    """Problems start to start + count - 1 of the endless training stream of that seed.

    `make(number)` builds a problem from a number in 0..2^31-1, always the same from the same. Problem i of a stream is
    a pure function of (seed, i), so that a run can go on in the middle. `split_by` is the text that decides whether a
    problem is held out; the prompt where the id says more than it.
    """
    return [_first(make, f"train/{seed}/{i}", split_by, for_eval=False) for i in range(start, start + count)]


def eval_set(make: Callable[[int], P], count: int, *, split_by: Callable[[P], str] = _id) -> list[P]:
    """The first `count` distinct held-out problems. Raises ValueError when the environment has fewer."""
    found: dict[str, P] = {}
    for attempt in range(count * 100):
        problem = _first(make, f"heldout/{attempt}", split_by, for_eval=True)
        found.setdefault(problem.id, problem)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"num_eval is {count}, but the environment has only about {len(found)} distinct held-out problems")


def is_eval(text: str) -> bool:
    """Whether a problem of this id, or of whatever else the split is by, is on the held-out side."""
    return _number(f"split/{text}") < EVAL_FRACTION * 2**31


def _first(make: Callable[[int], P], key: str, split_by: Callable[[P], str], *, for_eval: bool) -> P:
    for attempt in range(_ATTEMPTS_PER_PROBLEM):
        problem = make(_number(f"{key}/{attempt}"))
        if is_eval(split_by(problem)) == for_eval:
            return problem
    raise ValueError(f"no {'held-out' if for_eval else 'training'} problem found in {_ATTEMPTS_PER_PROBLEM} attempts")


def _number(key: str) -> int:
    """A number in 0..2^31-1 that depends on the key alone, on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
