"""From the datums of one micro-batch to one row of tokens without padding, on which every distinct prefix stands once.

The completions of a prompt repeat the prompt. Under causal attention what a token becomes depends only on what precedes
it, so a common prefix goes through the model once, all its continuations attend to it, and the gradient of their sum
flows back through it: the same numbers for a fraction of the tokens.

Legend: T tokens of a datum, L tokens of the row, S scored positions (those of non-zero weight, counted per datum).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.types import Datum

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Datums that begin with the same tokens."""

    prefix: int
    """Number of tokens that they share; 0 for a datum on its own."""
    members: tuple[int, ...]
    """Their indices in the batch."""

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens they take together; `lengths` are those of all datums of the batch."""
        return self.prefix + sum(lengths[i] - self.prefix for i in self.members)


def group_by_prefix(batch: Sequence[Datum]) -> list[PrefixGroup]:
    """Groups datums whose tokens are the same up to and including the first position that is scored.

    In the order of each group's first member. A datum that nobody shares with is a group with prefix 0.
    """
    groups: dict[bytes, list[int]] = {}
    for i, datum in enumerate(batch):
        groups.setdefault(datum.tokens[: _prefix(datum)].tobytes(), []).append(i)
    return [
        PrefixGroup(_prefix(batch[members[0]]) if len(members) > 1 else 0, tuple(members))
        for members in groups.values()
    ]


def _prefix(datum: Datum) -> int:
    """Tokens up to and including the first scored position; all of them where nothing is scored."""
    scored = np.flatnonzero(datum.weights)
    return int(scored[0]) + 1 if len(scored) else len(datum.tokens)


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of a row that attends only to itself: a prefix, and suffixes that attend to it and to themselves."""

    prefix: int
    """Number of tokens that come first."""
    suffixes: tuple[int, ...] = ()
    """Number of tokens of each suffix; suffixes do not see each other. May be 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole document."""
        return self.prefix + sum(self.suffixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The datums of one micro-batch, document after document, with what the loss needs at scored positions."""

    tokens: Ints
    """[L]"""
    positions: Ints
    """[L] position within the datum; a suffix goes on where its prefix ended."""
    documents: tuple[Document, ...]
    """They add up to the row."""
    lengths: tuple[int, ...]
    """T of each datum, in the order given."""
    scored: Ints
    """[S] indices into the row; the last token of a prefix occurs once per suffix."""
    datum_index: Ints
    """[S] which datum each scored position belongs to."""
    datum_position: Ints
    """[S] where in its datum."""
    loss_inputs: Mapping[str, NDArray[Any]]
    """Each [S]; always holds `target_tokens` and `weights`."""

    def unpack(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """[S] values of the scored positions -> one [T] array per datum, 0 where nothing is scored."""
        starts = np.cumsum((0, *self.lengths))
        flat = np.zeros(starts[-1], dtype=np.float32)
        flat[starts[self.datum_index] + self.datum_position] = values
        return np.split(flat, starts[1:-1])


def pack_row(datums: Sequence[Datum], *, share_prefixes: bool) -> PackedRow:
    """Packs at least one datum; all name the same loss inputs."""
    groups = group_by_prefix(datums) if share_prefixes else [PrefixGroup(0, (i,)) for i in range(len(datums))]
    tokens: list[Ints] = []
    positions: list[Ints] = []
    scored: list[Ints] = []
    datum_index: list[Ints] = []
    datum_position: list[Ints] = []
    documents: list[Document] = []
    start = 0
    for group in groups:
        prefix = group.prefix
        if prefix:
            tokens.append(datums[group.members[0]].tokens[:prefix])
            positions.append(np.arange(prefix))
        prefix_start, start = start, start + prefix
        for i in group.members:
            datum = datums[i]
            tokens.append(datum.tokens[prefix:])
            positions.append(np.arange(prefix, len(datum.tokens)))
            here = np.flatnonzero(datum.weights)
            scored.append(here + np.where(here < prefix, prefix_start, start - prefix))
            datum_index.append(np.full(len(here), i))
            datum_position.append(here)
            start += len(datum.tokens) - prefix
        own = tuple(len(datums[i].tokens) - prefix for i in group.members)
        documents.append(Document(prefix, own) if prefix else Document(own[0]))
    index, position = np.concatenate(datum_index), np.concatenate(datum_position)
    lengths = tuple(len(datum.tokens) for datum in datums)
    flat = np.cumsum((0, *lengths))[index] + position
    names = datums[0].loss_inputs.keys() - {"weights"}
    return PackedRow(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        documents=tuple(documents),
        lengths=lengths,
        scored=np.concatenate(scored),
        datum_index=index,
        datum_position=position,
        loss_inputs={
            "weights": np.concatenate([datum.weights for datum in datums])[flat],
            **{name: np.concatenate([datum.loss_inputs[name] for datum in datums])[flat] for name in names},
        },
    )


def pad_row(row: PackedRow, multiple: int) -> PackedRow:
    """Lengthens a row to a multiple of `multiple` tokens, by a document of its own that holds nothing to score."""
    missing = -len(row.tokens) % multiple
    if not missing:
        return row
    return replace(
        row,
        tokens=np.concatenate([row.tokens, np.zeros(missing, dtype=np.int64)]),
        positions=np.concatenate([row.positions, np.arange(missing)]),
        documents=(*row.documents, Document(missing)),
    )
