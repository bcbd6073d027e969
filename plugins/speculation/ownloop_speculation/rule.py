"""When drafts pay: what a step costs, measured, and what looking for drafts has brought."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ownloop_speculation.history import History

_NUM_BENDS = 9
"""Of the curve of costs: 1 row, 2, 4 and so on, to 256."""
_DECAY = 0.99
"""A step of 100 steps ago counts for a third."""
_DECAY_OF_COSTS = 0.995
"""How the costs of steps compare changes with what runs: a step of 200 steps ago counts for a third."""
_DECAY_OF_LOAD = 0.95
"""A step of 20 steps ago counts for a third."""
_KNOWN = 20
"""Steps of about as many rows, after which one that takes longer tells of the load, and before of the rows."""
_ROWS_PER_STEP = 16.0
"""Before rows were varied: what a step costs at all is that of so many rows."""
_MAX_DISTURBED = 4
"""Steps in a row that other work on the host may have disturbed."""
_TRIAL = 32
"""Steps that are looked at before looking has to pay."""
_PROBE = 64
"""Where looking does not pay, one step of so many is looked at."""


class DraftRule:
    """Seconds of a step, and which drafts are worth theirs.

    A row is one token that is computed, sampled or drafted. Seconds are linear in rows between powers of two, and steps
    with drafts take `check` more: least squares. All of it is multiplied by the load, which follows what the newest
    steps took: contexts grow, and other work on the host takes caches and the memory's bandwidth. So older steps
    still tell how rows compare, of which some numbers are rare.
    """

    def __init__(self) -> None:
        """Begins with ratios that hardly count, so that all costs follow from the first step on."""
        self.curve: list[float] = [0.0] * _NUM_BENDS
        self._load = 1.0
        self.check = self.look = self.prompt = 0.0
        """`look`: seconds of looking for the draft of one request. `prompt`: of a prompt's token but the last."""
        size = _NUM_BENDS + 1
        self._moments: NDArray[np.float64] = np.zeros((size, size))
        self._seconds: NDArray[np.float64] = np.zeros(size)
        prior = np.zeros((size, size))
        prior[0, :2] = (_ROWS_PER_STEP + 2) / (_ROWS_PER_STEP + 1), -1
        prior[1, [0, 1, -1]] = 1, -1, 1  # a check costs a row
        for bend in range(_NUM_BENDS - 2):  # a straight line
            prior[2 + bend, bend : bend + 3] = 2, -3, 1
        self._prior: NDArray[np.float64] = 0.1 * prior.T @ prior
        self._num_steps = self._num_asked = self._num_slow = self._most_rows = 0
        # By powers of 2 of running requests, each of which has a bound of its own.
        self._num_looks, self._balances = dict[int, int](), dict[int, float]()
        self._paces = dict[int, tuple[float, float]]()
        """Tokens and seconds of the newest steps, by the same powers."""
        self._prompts = (0.0, 0.0)
        """Tokens of the newest prompts, and what they took."""

    @classmethod
    def with_costs(
        cls, curve: Sequence[float], check: float = 0.0, look: float = 0.0, prompt: float = 0.0
    ) -> "DraftRule":
        """A rule that knows what steps of 1, 2, 4 ... rows cost. It goes on as a line behind the last of them."""
        rule = cls()
        rule.curve = list(curve)
        while len(rule.curve) < _NUM_BENDS:
            last, before = rule.curve[-1], rule.curve[-2]
            rule.curve.append(last + 2 * (last - before))
        rule.check, rule.look, rule.prompt, rule._num_steps = check, look, prompt, 1
        return rule

    def costs(self) -> dict[str, float]:
        """What steps of 1, 2, 4 ... rows cost, to the most that were measured; a check, a look, a prompt's token."""
        measured = max(2, self._most_rows.bit_length())
        curve = {f"rows_{1 << bend}": self._load * value for bend, value in enumerate(self.curve[:measured])}
        return {**curve, "check": self._load * self.check, "look": self.look, "prompt": self.prompt}

    def observe_step(self, rows: int, seconds: float, *, checks: bool) -> None:
        """Counts a step without prompts. One that took more than three times what was expected was disturbed.

        Unless those before did so, too: then the expectation is wrong, as where so few rows were never measured.
        """
        expected = self.seconds(rows, checks=checks)
        is_slow = self._num_steps > 8 and seconds > 3 * expected
        self._num_slow = self._num_slow + 1 if is_slow else 0
        if 0 < self._num_slow <= _MAX_DISTURBED:
            return
        self._num_steps += 1
        self._most_rows = max(rows, self._most_rows)
        features = np.zeros(_NUM_BENDS + 1)
        bend, beyond = _place(rows)
        if self._moments[bend, bend] + self._moments[bend + 1, bend + 1] > _KNOWN and not is_slow:
            self._load *= _DECAY_OF_LOAD + (1 - _DECAY_OF_LOAD) * seconds / expected
        features[bend], features[bend + 1], features[-1] = 1 - beyond, beyond, checks
        self._moments = _DECAY_OF_COSTS * self._moments + np.outer(features, features)
        self._seconds = _DECAY_OF_COSTS * self._seconds + features * seconds / self._load
        if self._num_steps < 8 or self._num_steps % 8 == 0:
            moments = self._moments + self._prior
            found = np.linalg.solve(moments, self._seconds)
            if found[-1] < 0:
                found = np.append(np.linalg.solve(moments[:-1, :-1], self._seconds[:-1]), 0)
            self.curve, self.check = np.maximum.accumulate(found[:-1].clip(0)).tolist(), float(found[-1])

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Counts what a step took that also computed so many tokens of prompts, beyond what it would take without."""
        tokens, taken = self._prompts
        self._prompts = _DECAY * tokens + num_tokens, _DECAY * taken + seconds
        self.prompt = max(0.0, self._prompts[1] / self._prompts[0])

    def observe_tokens(self, running: int, drafted: int, num_tokens: int) -> None:
        """Counts what a step has sampled."""
        tokens, seconds = self._paces.get(running.bit_length(), (0.0, 0.0))
        seconds = _DECAY * seconds + self.seconds(running + drafted, checks=drafted > 0)
        self._paces[running.bit_length()] = _DECAY * tokens + num_tokens, seconds

    def observe_look(self, running: int, saved: float, took: float) -> None:
        """Counts what looking for drafts took, in seconds, and what the drafts then saved.

        A loss is forgotten beyond what the looks of a trial take: it may be one of costs that were not known yet.
        """
        size = running.bit_length()
        self._num_looks[size] = self._num_looks.get(size, 0) + 1
        self._balances[size] = max(_DECAY * self._balances.get(size, 0.0) + saved - took, -_TRIAL * took)
        self.look += (took / running - self.look) / min(100, sum(self._num_looks.values()))

    def seconds(self, rows: int, *, checks: bool = False) -> float:
        """What a step of so many rows takes."""
        bend, beyond = _place(rows)
        unloaded = self.curve[bend] + beyond * (self.curve[bend + 1] - self.curve[bend]) + self.check * checks
        return self._load * unloaded

    def least_chance(self, running: int) -> float:
        """A chance below which drafted tokens do not pay while so many requests run: what twice the rows cost more.

        If it is accepted, a token saves its request's share of a step.
        """
        total = self.seconds(running)
        return self.seconds(2 * running) / total - 1 if total > 0 else 1.0

    def choose(self, chances: Sequence[Sequence[float]], most: int) -> list[int]:
        """How many tokens of each request's draft a step should check: those that give the most tokens a second.

        That is over all steps, not over this one: a step's time is worth the tokens that come in it at the pace of the
        steps before (Dinkelbach's method for the best ratio of two sums, https://doi.org/10.1287/mnsc.13.7.492). So a
        step with good drafts takes on more of them, and one with poor drafts fewer. `chances` are falling, and at most
        `most` tokens are chosen.
        """
        running = len(chances)
        ranked = sorted(((chance, place) for place, each in enumerate(chances) for chance in each), reverse=True)
        pace = self._pace(running)
        best, num_chosen, expected = -pace * self.seconds(running), 0, 0.0
        for number, (chance, _) in enumerate(ranked[:most], start=1):
            expected += chance
            value = expected - pace * self.seconds(running + number, checks=True)
            if value > best:
                best, num_chosen = value, number
        sizes = [0] * running
        for _, place in ranked[:num_chosen]:
            sizes[place] += 1
        return sizes

    def _pace(self, running: int) -> float:
        """Tokens a second: at least what steps without drafts sample."""
        tokens, seconds = self._paces.get(running.bit_length(), (0.0, 0.0))
        return max(running / max(self.seconds(running), 1e-9), tokens / max(seconds, 1e-9))

    def gain(self, running: int, accepted: float, drafted: int) -> float:
        """Seconds that a step with drafts saves, of which so many are accepted."""
        without = (running + accepted) * self.seconds(running) / running
        return without - self.seconds(running + drafted, checks=drafted > 0)

    def is_worth_a_look(self, running: int) -> bool:
        """Whether to look for drafts in this step: after a trial, where it has paid, and else now and then."""
        self._num_asked += 1
        size = running.bit_length()
        pays = self._balances.get(size, 0.0) >= 0 or self._num_looks.get(size, 0) < _TRIAL
        return self._num_steps > 0 and (pays or self._num_asked % _PROBE == 0)


def propose(
    history: "History", rule: DraftRule, longest: Mapping[str, int], min_chance: float, most: int
) -> list[list[int]]:
    """The drafts of running requests: at most so many tokens each (`longest`), and `most` in all."""
    least = max(min_chance, rule.least_chance(len(longest)))
    drafts = [history.draft(request, size if least < 1 else 0, least) for request, size in longest.items()]
    sizes = rule.choose([draft.chances for draft in drafts], most)
    return [draft.tokens[:size] for draft, size in zip(drafts, sizes, strict=True)]


def _place(rows: int) -> tuple[int, float]:
    """The bend before a number of rows, and how far it is on the way to the next one."""
    bend = min(rows.bit_length() - 1, _NUM_BENDS - 2)
    return bend, rows / (1 << bend) - 1
