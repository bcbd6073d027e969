"""Kept sets, the words that a cut has left for each token, and routes, the experts that were chosen."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rl.sampling import KeptSets, SamplingParams, routes_fault

SETS = KeptSets.of([[3], [], [1, 4, 9], [0, 70_000]])
TARGETS = np.array([3, 5, 4, 70_000])
ROUTES = np.array([[[0, 1], [1, 0]], [[2, 0], [1, 2]], [[1, 2], [0, 1]]], np.uint8)
"""Two experts of each of three tokens, in two layers."""


def test_a_cut_has_a_bounded_number_of_words() -> None:
    for cut, top_k in (({"top_p": 0.9}, 512), ({"min_p": 0.1}, 512), ({"top_p": 0.9, "top_k": 20}, 20), ({}, -1)):
        sampling = SamplingParams(max_tokens=1, **cut)  # pyright: ignore[reportArgumentType]
        assert (sampling.most_kept, sampling.cuts) == (top_k, top_k > 0)


def test_sets_are_taken_and_joined() -> None:
    assert SETS.ids.dtype == np.int32
    assert SETS.take(np.array([2, 2, 0])) == KeptSets.of([[1, 4, 9], [1, 4, 9], [3]])
    assert SETS.part(1, 3) == KeptSets.of([[], [1, 4, 9]])
    assert KeptSets.joined([KeptSets.whole(2), SETS.part(0, 1)]) == KeptSets.of([[], [], [3]])
    assert KeptSets.of([[3], [1], [], [3]]).numbers().tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("sets", "fault"),
    [
        (SETS, ""),
        (SETS.part(0, 3), "has 3 sets; there are 4 tokens"),
        (KeptSets(SETS.ids.astype(np.int64), SETS.starts), "has ids of dtype int64; they must be uint16 or int32"),
        (
            replace(SETS, starts=np.array([0, 1, 0, 4, 6])),
            "has starts that do not rise from 0 to the number of its ids, 6",
        ),
        (KeptSets.of([[3], [], [1, 4], [70_000, 90_000]]), "has the token 90000; token ids are between 0 and 79999"),
        (KeptSets.of([[3], [], [4, 1], [70_000]]), "has a set, at 2, whose tokens do not rise"),
        (KeptSets.of([[3], [], [4, 4], [70_000]]), "has a set, at 2, whose tokens do not rise"),
        (KeptSets.of([[3], [4], [4], [70_000]]), "has a set, at 1, without the token 5 that was sampled from it"),
    ],
)
def test_faults_are_named(sets: KeptSets, fault: str) -> None:
    assert sets.fault(TARGETS, 80_000) == fault


@pytest.mark.parametrize(
    ("routes", "fault"),
    [
        (np.zeros((2, 3, 2)), "has shape (2, 3, 2); (3, 2, 2) is expected: tokens, layers, experts of a token"),
        (ROUTES.astype(np.int64), "has dtype int64; it must be uint8 or uint16"),
        (ROUTES + np.uint8(2), "has the expert 4; experts are between 0 and 3"),
        (np.where(ROUTES == 2, np.uint8(0), ROUTES), "has the expert 0 twice, at position 1 in layer 0"),
        (ROUTES, ""),
    ],
)
def test_faults_of_routes_are_named(routes: NDArray[Any], fault: str) -> None:
    assert routes_fault(routes, 3, (2, 2, 4)) == fault
