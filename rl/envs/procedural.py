"""Parts of procedurally generated environments: problems by number, and a training/held-out split without leaks.

Whether a problem is held out depends on its text, not on when or how often it is drawn (`rl.data.rows`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rl.data.rows import hashed_number, is_eval
from rl.protocols import Done, Problem, Prompt
from rl.types import Answer

_ATTEMPTS_PER_PROBLEM = 1000  # finds a held-out problem, a tenth of all, practically always


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProblem:
    """A single-turn problem: a prompt and a function that scores the answer's text."""

    id: str
    prompt: Prompt
    score: Callable[[str], float]
    answer: str | None = None
    """A right completion, if one is known."""
    wrong_answers: tuple[str, ...] = ()
    """Plausible wrong completions, if some are known."""

    def start(self) -> "TextProblem":
        """Returns itself: a single-turn problem has no state."""
        return self

    def reply(self, completion: str) -> Done:
        """Scores the answer, without its reasoning, and ends the episode."""
        return Done(reward=self.score(Answer.read(completion).content))

    def answer_of(self, completion: str) -> str:
        """The answer without its reasoning and without a full stop."""
        return Answer.read(completion).content.strip().removesuffix(".")


P = TypeVar("P", bound=Problem)


def _id(problem: Problem) -> str:
    return problem.id


def train_stream(
    make: Callable[[int], P], seed: int, start: int, count: int, *, split_by: Callable[[P], str] = _id
) -> list[P]:
    """Problems start to start + count - 1 of the endless training stream of this seed.

    `make(number)` builds a problem from a number in 0..2^31-1 and must be a pure function. Then problem i of a stream
    is a pure function of (seed, i), so that a run can be resumed anywhere. `split_by` returns the text that decides
    whether a problem is held out: its id by default. If several ids have the same prompt, split by the prompt.
    """
    return [_first(make, f"train/{seed}/{i}", split_by, for_eval=False) for i in range(start, start + count)]


def eval_set(make: Callable[[int], P], count: int, *, split_by: Callable[[P], str] = _id) -> list[P]:
    """The first `count` distinct held-out problems. Raises ValueError if the environment has fewer."""
    found: dict[str, P] = {}
    last_new = 0
    for attempt in range(count * 100):  # draws repeat, the more so the fewer distinct problems there are
        # The key decides which problems are drawn: another word would change every evaluation.
        problem = _first(make, f"heldout/{attempt}", split_by, for_eval=True)
        last_new = last_new if problem.id in found else attempt
        found.setdefault(problem.id, problem)
        if len(found) == count:
            return list(found.values())
        if attempt - last_new > 10_000 + 100 * len(found):  # there is none left to be drawn
            break
    raise ValueError(f"num_eval is {count}, but the environment has only about {len(found)} distinct held-out problems")


def _first(make: Callable[[int], P], key: str, split_by: Callable[[P], str], *, for_eval: bool) -> P:
    """The first problem on the wanted side, of the ones that the key draws."""
    for attempt in range(_ATTEMPTS_PER_PROBLEM):
        problem = make(hashed_number(f"{key}/{attempt}"))
        if is_eval(split_by(problem)) == for_eval:
            return problem
    raise ValueError(f"no {'held-out' if for_eval else 'training'} problem found in {_ATTEMPTS_PER_PROBLEM} attempts")
