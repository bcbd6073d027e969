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
_MAX_PLACES = 32
_MAX_DRAFT = 64
_WEIGHTS = [0.6**number for number in range(LONGEST)]
"""What a place counts for the agreement, by how many tokens shorter its context is than the longest."""
_BEFORE, _BEHIND = np.full(LONGEST, -3, np.int32), np.full(_MAX_DRAFT, START, np.int32)
_UNKNOWN_BEFORE, _UNKNOWN_BEHIND = np.full(LONGEST, UNKNOWN, np.uint8), np.full(_MAX_DRAFT, UNKNOWN, np.uint8)
_BACK, _AHEAD = np.arange(1, LONGEST + 1), np.arange(_MAX_DRAFT)


class Text:
    """Tokens that a context is looked for in, the newest last. A negative one ends what came before it."""

    def __init__(self, parts: Sequence[tuple[Tokens, Chances]]) -> None:
        """Of parts, which are copied."""
        self._tokens: Tokens = np.concatenate((_BEFORE, *(tokens for tokens, _ in parts), _BEHIND))
        self._chances: Chances = np.concatenate((_UNKNOWN_BEFORE, *(chances for _, chances in parts), _UNKNOWN_BEHIND))

    def followed_by(self, parts: Sequence[tuple[Tokens, Chances]], most: int | None = None) -> "Text":
        """This text and parts behind it. With `most` it loses its oldest tokens, so that there are no more in all."""
        tokens, chances = self._tokens[LONGEST:-_MAX_DRAFT], self._chances[LONGEST:-_MAX_DRAFT]
        if most is not None:
            first = max(0, len(tokens) + sum(len(each) for each, _ in parts) - most)
            tokens, chances = tokens[first:], chances[first:]
        return Text([(tokens, chances), *parts])

    def find(self, context: Sequence[int], most: int) -> list[Place]:
        """The places behind the longest ends of a context that occur, at most 32: the longest last, then the newest.

        `most` tokens that come next are returned of each.
        """
        tokens, backwards = self._tokens, np.array(context, dtype=np.int32)[::-1]
        places = np.flatnonzero(tokens[:-_MAX_DRAFT] == backwards[0]) + 1
        places = places[tokens[places] >= 0]
        if len(backwards) > 1:
            longer = places[tokens[places - 2] == backwards[1]]
            places = longer if len(longer) else places
        if not len(places):
            return []
        differs = tokens[places[:, None] - _BACK[: len(backwards)]] != backwards
        lengths = differs.argmax(axis=1)
        lengths[lengths == 0] = len(backwards)  # the last token never differs, so nothing does
        chosen = lengths.argsort(kind="stable")[-_MAX_PLACES:]
        ahead = places[chosen, None] + _AHEAD[:most]
        return list(zip(lengths[chosen].tolist(), tokens[ahead].tolist(), self._chances[ahead].tolist(), strict=True))


def guess(following: Sequence[tuple[int, int]]) -> tuple[int, int, float]:
    """Of tokens with their chances: that of the largest chances, how often it is there, and the mean of its chance.

    The mean is of what its chance was, or was at most where another token was sampled.
    """
    sums, counts = dict[int, int](), dict[int, int]()
    for token, chance in reversed(following):  # of equals, the newest
        sums[token] = sums.get(token, 0) + chance
        counts[token] = counts.get(token, 0) + 1
    found = max(sums, key=sums.__getitem__)
    total, mean = float(sums[found]), sums[found] / counts[found]
    if len(sums) > 1:  # where another token was sampled, this one had at most the rest
        total += sum(min(mean, 255 - chance) for token, chance in following if token != found)
    return found, counts[found], total / len(following) / 255


def agreement(places: Sequence[Place], depth: int, token: int) -> float:
    """The share of places at which this token came next but `depth`. Those of shorter contexts count less."""
    longest = places[-1][0]
    agreed, total = 0.3, 0.6  # few places say little
    for length, following, _ in places:
        weight = _WEIGHTS[longest - length]
        total += weight
        agreed += weight * (following[depth] == token)
    return agreed / total
