"""Tokens per second of the last minutes, for those who watch a server."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

Work = Literal["trained", "sampled"]
BUCKET_S = 5.0
"""The length of one point of the history."""
_NUM_BUCKETS = 60


class Throughput:
    """Counts the tokens of one model."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._buckets: deque[tuple[int, Counter[Work]]] = deque(maxlen=_NUM_BUCKETS)
        self.totals: Counter[Work] = Counter()
        """Tokens since the server began."""

    def add(self, work: Work, num_tokens: int) -> None:
        """Counts tokens that were just trained or sampled."""
        self.totals[work] += num_tokens
        now = int(self._clock() / BUCKET_S)
        if not self._buckets or self._buckets[-1][0] != now:
            self._buckets.append((now, Counter()))
        self._buckets[-1][1][work] += num_tokens

    def history(self, work: Work) -> list[float]:
        """Tokens per second, oldest first, of the last five minutes. The bucket that is being filled is left out."""
        now = int(self._clock() / BUCKET_S)
        counted = dict(self._buckets)
        return [counted.get(now - age, Counter[Work]())[work] / BUCKET_S for age in range(_NUM_BUCKETS, 0, -1)]
