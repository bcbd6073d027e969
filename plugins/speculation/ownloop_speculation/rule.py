"""When drafts pay: what a step costs, measured, and what looking for drafts has brought."""

import numpy as np
from numpy.typing import NDArray

_DECAY = 0.99
"""A step of 100 steps ago counts for a third."""
_ROWS_PER_STEP = 16.0
"""Before rows were varied: what a step costs at all is that of so many rows."""
_TRIAL = 32
"""Steps that are looked at before looking has to pay."""
_PROBE = 16
"""Where looking does not pay, one step of so many is looked at."""


class DraftRule:
    """Seconds of a step = `step` + `row` x rows + `check`, the last only of steps with drafts: least squares.

    A row is one token that is computed, sampled or drafted. The newest steps count most, since contexts grow.
    """

    def __init__(self) -> None:
        """Begins with ratios that hardly count, so that all costs follow from the first step on."""
        self.step = self.row = self.check = 0.0
        self._moments: NDArray[np.float64] = np.zeros((3, 3))
        self._seconds: NDArray[np.float64] = np.zeros(3)
        prior = np.array([[1.0, -_ROWS_PER_STEP, 0.0], [0.0, 1.0, -1.0]])
        self._prior: NDArray[np.float64] = 0.1 * prior.T @ prior
        self._num_steps = self._num_asked = 0
        # By powers of 2 of running requests, each of which has a bound of its own.
        self._num_looks, self._balances = dict[int, int](), dict[int, float]()

    def observe_step(self, rows: int, seconds: float, *, checks: bool) -> None:
        """Counts a step without prompts. One that took more than three times what was expected was disturbed."""
        if self._num_steps > 8 and seconds > 3 * self.seconds(rows, checks=checks):
            return
        self._num_steps += 1
        features = np.array([1.0, rows, checks])
        self._moments = _DECAY * self._moments + np.outer(features, features)
        self._seconds = _DECAY * self._seconds + features * seconds
        if self._num_steps < 8 or self._num_steps % 8 == 0:
            found = np.linalg.solve(self._moments + self._prior, self._seconds)
            self.step, self.row, self.check = found.clip(0).tolist()

    def observe_look(self, running: int, saved: float, took: float) -> None:
        """Counts what looking for drafts took, in seconds, and what the drafts then saved."""
        size = running.bit_length()
        self._num_looks[size] = self._num_looks.get(size, 0) + 1
        self._balances[size] = _DECAY * self._balances.get(size, 0.0) + saved - took

    def seconds(self, rows: int, *, checks: bool = False) -> float:
        """What a step of so many rows takes."""
        return self.step + self.row * rows + self.check * checks

    def least_chance(self, running: int) -> float:
        """The chance above which a drafted token pays while so many requests run.

        The token costs a row. If it is accepted, its request needs one step less, of which it pays its share.
        """
        total = self.seconds(running)
        return self.row * running / total if total > 0 else 1.0

    def gain(self, running: int, accepted: float, drafted: int) -> float:
        """Seconds that a step with drafts saves, of which so many are accepted."""
        return accepted * self.seconds(running) / running - drafted * self.row - self.check

    def is_worth_a_look(self, running: int) -> bool:
        """Whether to look for drafts in this step: after a trial, where it has paid, and else now and then."""
        self._num_asked += 1
        size = running.bit_length()
        pays = self._balances.get(size, 0.0) >= 0 or self._num_looks.get(size, 0) < _TRIAL
        return self._num_steps > 0 and (pays or self._num_asked % _PROBE == 0)
