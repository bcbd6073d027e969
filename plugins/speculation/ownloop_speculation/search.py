"""Where a context occurs in tokens that were sampled, and what came next there."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Chances = NDArray[np.uint8]
"""0 stands for 0 and 255 for 1."""
Place = tuple[int, list[int], list[int]]
"""The length of the context that occurs there, the tokens that come next, and the chances of these."""

START = -1
"""Stands before a completion, so that its start is a context too."""
LONGEST = 16
"""Tokens of a context."""
UNKNOWN = 178
"""The chance of what was not sampled, and of a token without a log-prob: 0.7."""
_MAX_PLACES = 16
_MAX_DRAFT = 64
_WEIGHTS = [0.6**number for number in range(LONGEST)]
"""What a place counts, by how many tokens shorter its context is than the longest."""
_NEVER = -4
"""Occurs nowhere."""
_BEFORE, _BEHIND = np.full(LONGEST + 1, -3, np.int32), np.full(_MAX_DRAFT, START, np.int32)
_UNKNOWN_BEFORE, _UNKNOWN_BEHIND = np.full(LONGEST + 1, UNKNOWN, np.uint8), np.full(_MAX_DRAFT, UNKNOWN, np.uint8)
_BACK, _AHEAD = np.arange(1, LONGEST + 2), np.arange(_MAX_DRAFT)


class Text:
    """Tokens that a context is looked for in, the newest last. A negative one ends what came before it."""

    def __init__(self, parts: Sequence[tuple[Tokens, Chances]]) -> None:
        """Of parts, which are copied."""
        self._tokens: Tokens = np.concatenate((_BEFORE, *(tokens for tokens, _ in parts), _BEHIND))
        self._chances: Chances = np.concatenate((_UNKNOWN_BEFORE, *(chances for _, chances in parts), _UNKNOWN_BEHIND))

    def followed_by(self, parts: Sequence[tuple[Tokens, Chances]], most: int | None = None) -> "Text":
        """This text and parts behind it. With `most` it loses its oldest tokens, so that there are no more in all."""
        tokens, chances = self._tokens[len(_BEFORE) : -_MAX_DRAFT], self._chances[len(_BEFORE) : -_MAX_DRAFT]
        if most is not None:
            first = max(0, len(tokens) + sum(len(each) for each, _ in parts) - most)
            tokens, chances = tokens[first:], chances[first:]
        return Text([(tokens, chances), *parts])

    def find(self, context: Sequence[int], most: int) -> list[Place]:
        """The places behind the longest ends of a context that occur, at most 16: the longest last, then the newest.

        `most` tokens that come next are returned of each.
        """
        tokens, backwards = self._tokens, np.array([_NEVER, *context], dtype=np.int32)[::-1]
        places = np.flatnonzero(tokens[:-_MAX_DRAFT] == backwards[0]) + 1
        places = places[tokens[places] >= 0]
        longer = places[tokens[places - 2] == backwards[1]]
        places = longer if len(longer) else places
        if not len(places):
            return []
        lengths = (tokens[places[:, None] - _BACK[: len(backwards)]] != backwards).argmax(axis=1)
        chosen = lengths.argsort(kind="stable")[-_MAX_PLACES:]
        ahead = places[chosen, None] + _AHEAD[:most]
        return list(zip(lengths[chosen].tolist(), tokens[ahead].tolist(), self._chances[ahead].tolist(), strict=True))


def vote(places: Sequence[Place], depth: int) -> tuple[int, float, float, float]:
    """Of the tokens that came next but `depth`, the one of the largest chances. Shorter contexts count less.

    Returns the token, its chance, the share of places at which it came, and what all places count together. The chance
    is the mean of what it was, or was at most where another token was sampled.
    """
    longest, total = places[-1][0], 0.0
    sums, counts = dict[int, float](), dict[int, float]()
    for length, tokens, chances in reversed(places):  # of equals, the newest
        weight, token = _WEIGHTS[longest - length], tokens[depth]
        sums[token] = sums.get(token, 0.0) + weight * chances[depth]
        counts[token] = counts.get(token, 0.0) + weight
        total += weight
    found = max(sums, key=sums.__getitem__)
    most, mean = sums[found], sums[found] / counts[found]
    if len(sums) > 1:  # where another token was sampled, this one had at most the rest
        for length, tokens, chances in places:
            if tokens[depth] != found:
                most += _WEIGHTS[longest - length] * min(mean, 255 - chances[depth])
    agreed = (counts[found] + 0.3) / (total + 0.6)  # few places say little
    return found, most / total / 255, agreed, total
