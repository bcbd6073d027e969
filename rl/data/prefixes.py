"""Finds what the datums of a batch have in common at their beginning, so that it is computed once.

Under causal attention the hidden states of tokens do not depend on what follows. Datums that begin with the same tokens
can share them: the completions of a prompt share the prompt, and two of them that begin alike share more.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl.types import Datum

Ints = NDArray[np.int64]

# An opening of fewer tokens is not worth the copies of its keys and values that every document needs.
_SHORTEST_OPENING = 8


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Datums with the same shareable prefix, in an order in which those that begin alike are neighbours."""

    members: tuple[int, ...]
    """Indices of the datums in the batch."""
    shared: tuple[int, ...]
    """For each member, how many of its first tokens it shares with the member before it; 0 for the first.

    Members i < k share as many as the least of `shared[i + 1 : k + 1]`."""

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the group on a packed row. `lengths` holds the number of tokens of every datum of the batch."""
        return sum(lengths[i] - shared for i, shared in zip(self.members, self.shared, strict=True))

    def part(self, start: int, stop: int) -> "PrefixGroup":
        """The group of the members `start` to `stop - 1`."""
        return PrefixGroup(self.members[start:stop], (0, *self.shared[start + 1 : stop]))


def shareable_prefix(datum: Datum) -> Ints:
    """The tokens that make a datum a member of its group: all up to and including the first position that counts.

    A sampled datum's shareable prefix is its prompt. Positions of weight 0 or `REPORTED_WEIGHT` do not count; without
    others it is the whole datum.
    """
    counting = np.flatnonzero(datum.counted)
    return datum.tokens[: counting[0] + 1] if len(counting) else datum.tokens


def group_by_prefix(batch: Sequence[Datum], *, share_prefixes: bool = True) -> list[PrefixGroup]:
    """Groups the datums that have the same shareable prefix, in the order of each group's first datum.

    Without `share_prefixes` every datum is a group of its own.
    """
    if not share_prefixes:
        return [PrefixGroup((i,), (0,)) for i in range(len(batch))]
    groups: dict[bytes, list[int]] = {}
    for i, datum in enumerate(batch):
        groups.setdefault(shareable_prefix(datum).tobytes(), []).append(i)
    return [_sorted_group(batch, members) for members in groups.values()]


def common_opening(datums: Sequence[Datum], groups: Sequence[PrefixGroup]) -> int:
    """Number of tokens that all datums begin with and that can be computed once for all; 0 if it is not worth it.

    The last token of a shareable prefix is not among them, so that every group has a token of its own.
    """
    if len(groups) < 2:
        return 0
    prefixes = [shareable_prefix(datums[group.members[0]]) for group in groups]
    shortest = min(map(len, prefixes)) - 1
    length = min(_num_alike(prefix[:shortest], prefixes[0][:shortest]) for prefix in prefixes)
    return length if length >= _SHORTEST_OPENING else 0


def _sorted_group(batch: Sequence[Datum], members: Sequence[int]) -> PrefixGroup:
    # In any order of sequences by their first difference, those that begin alike are neighbours. That of bytes is one.
    if len(members) > 1:
        members = sorted(members, key=lambda i: batch[i].tokens.tobytes())
    tokens = [batch[i].tokens for i in members]
    shared = (_num_alike(a, b) for a, b in itertools.pairwise(tokens))
    return PrefixGroup(tuple(members), (0, *shared))


def _num_alike(a: Ints, b: Ints) -> int:
    """How many tokens two sequences begin with in common."""
    shortest = min(len(a), len(b))
    different = a[:shortest] != b[:shortest]
    first = int(different.argmax()) if shortest else 0
    return first if shortest and different[first] else shortest
