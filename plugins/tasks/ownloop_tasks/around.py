"""Problems that are made around other problems."""

from collections.abc import Callable, Sequence

from rl.protocols import Problem, ProblemOptions, given


class AroundProblem:
    """What a problem that is made around another one, its `problem`, has from that."""

    __slots__ = ()
    problem: Problem

    @property
    def answer(self) -> str | None:
        """A right completion; None if none is known."""
        return given(ProblemOptions, self.problem).answer

    @property
    def wrong_answers(self) -> Sequence[str]:
        """Plausible wrong completions; empty if none are known."""
        return given(ProblemOptions, self.problem).wrong_answers

    @property
    def answer_of(self) -> Callable[[str], str]:
        """See `Problem`."""
        return given(ProblemOptions, self.problem).answer_of
