"""Which tokens of a packed row attend to which, by the definition of `Document`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rl.data.packing import Document


def attended(documents: Sequence[Document]) -> NDArray[np.bool_]:
    """[L, L] whether a token (row) attends to another (column)."""
    segment_of: list[int] = []
    opening_of: list[int] = []
    reach: list[set[int]] = []  # for each segment: itself, and those that it comes after
    for document in documents:
        latest: dict[int, int] = {}  # depth -> the last segment of that depth
        depths = (0, *(document.depths or [1] * len(document.suffixes)))
        for size, depth in zip((document.prefix, *document.suffixes), depths, strict=True):
            latest[depth] = len(reach)
            reach.append({latest[depth], *(reach[latest[depth - 1]] if depth else ())})
            segment_of += [latest[depth]] * size
            opening_of += [document.opening] * size
    index = range(len(segment_of))
    pairs = [
        [key <= query and (key < opening_of[query] or segment_of[key] in reach[segment_of[query]]) for key in index]
        for query in index
    ]
    return np.array(pairs, dtype=np.bool_)
