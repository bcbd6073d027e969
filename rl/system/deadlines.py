"""How long to wait for the processes of a trainer or a generator before they are taken for hung."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """A call's deadline is `times_slowest` times the slowest call of the same verb so far, but at least `at_least_s`.

    A process that misses a deadline is killed, and the call raises `DeadlineError` with the process's Python stack. The
    time that a call spends behind earlier calls does not count, nor does the time in which the controller is stopped.
    """

    first_s: float = 1800.0
    """Seconds for the first call of a verb, for one with more than twice the tokens of any before, and for every call
    that writes or reads a checkpoint."""
    at_least_s: float = 120.0
    """Seconds that any later call may take."""
    times_slowest: float = 10.0
    """How many times longer than the slowest call so far a call may take."""
    stopped_s: float = 10.0
    """Seconds after which a process that is stopped (SIGSTOP) counts as hung, during any call."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        for name in ("first_s", "at_least_s", "stopped_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Deadlines.{name} is {getattr(self, name)}; it must be above 0")
        if not self.times_slowest >= 1:
            raise ValueError(f"Deadlines.times_slowest is {self.times_slowest}; it must be at least 1")

    def limit_s(self, slowest_s: float | None) -> float:
        """The deadline of a call whose slowest predecessor took `slowest_s` seconds; None means that there is none."""
        return self.first_s if slowest_s is None else max(self.at_least_s, self.times_slowest * slowest_s)
