"""Kept sets: the words that a cut has left for each token.

Covers: rl/sampling.py
"""

from dataclasses import replace

import numpy as np
import pytest

from rl.sampling import KeptSets, SamplingParams

SETS = KeptSets.of([[3], [], [1, 4, 9], [0, 70_000]])
TARGETS = np.array([3, 5, 4, 70_000])


def test_a_cut_has_a_bounded_number_of_words() -> None:
    for cut, top_k in (({"top_p": 0.9}, 512), ({"min_p": 0.1}, 512), ({"top_p": 0.9, "top_k": 20}, 20), ({}, -1)):
        sampling = SamplingParams(max_tokens=1, **cut)  # pyright: ignore[reportArgumentType]
        assert (sampling.top_k, sampling.cuts) == (top_k, top_k > 0)


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
        (KeptSets.of([[3], [], [1, 4], [70_000, 90_000]]), "has the word 90000; token ids are between 0 and 79999"),
        (KeptSets.of([[3], [], [4, 1], [70_000]]), "has a set, at 2, whose words do not rise"),
        (KeptSets.of([[3], [], [4, 4], [70_000]]), "has a set, at 2, whose words do not rise"),
        (KeptSets.of([[3], [4], [4], [70_000]]), "has a set, at 1, without the token 5 that was sampled from it"),
    ],
)
def test_faults_are_named(sets: KeptSets, fault: str) -> None:
    assert sets.fault(TARGETS, 80_000) == fault
