"""How long to wait for the processes of a trainer or a generator before they are taken for hung."""

from typing import Annotated

from pydantic import Field

from rl.configuration import Positive, configuration


@configuration
class Deadlines:
    """A call's deadline is `times_slowest` times the slowest call of the same verb so far, but at least `at_least_s`.

    A process that misses a deadline is killed, and the call raises `DeadlineError` with the process's Python stack. The
    time that a call spends behind earlier calls does not count, nor does the time in which the controller is stopped.
    """

    first_s: Positive = 1800.0
    """Seconds for the first call of a verb, for one with more than twice the tokens of any before, and for every call
    that writes or reads a checkpoint."""
    at_least_s: Positive = 120.0
    """Seconds that any later call may take."""
    times_slowest: Annotated[float, Field(ge=1)] = 10.0
    """How many times longer than the slowest call so far a call may take."""
    stopped_s: Positive = 10.0
    """Seconds after which a process that is stopped (SIGSTOP) counts as hung, during any call."""

    def limit_s(self, slowest_s: float | None) -> float:
        """The deadline of a call whose slowest predecessor took `slowest_s` seconds; None means that there is none."""
        return self.first_s if slowest_s is None else max(self.at_least_s, self.times_slowest * slowest_s)
