"""Packs the datums of one micro-batch into one row of tokens, without padding and with every shared prefix only once.

All completions of a prompt begin with the same tokens. Under causal attention the hidden states of a prefix do not
depend on what follows, so the prefix is computed once and all its suffixes attend to it. The gradients of the suffixes
add up in the prefix. The results are the same, for a fraction of the tokens. Different prompts begin alike too, with
what the chat template puts before them; this opening of all datums can be computed once for the whole row.

Legend: T tokens of a datum, L tokens of the row, S scored positions (those of non-zero weight, counted per datum).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl.types import REPORTED_WEIGHT, Datum

Ints = NDArray[np.int64]

# An opening of fewer tokens is not worth the copies of its keys and values that every document needs.
_SHORTEST_OPENING = 8
# Most tokens of a document of padding. No model has a shorter context.
_PADDING_DOCUMENT = 128


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Datums that begin with the same tokens."""

    prefix: int
    """Number of shared tokens; 0 for a group of one datum."""
    members: tuple[int, ...]
    """Indices of the datums in the batch."""

    def num_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the group on a packed row. `lengths` holds the number of tokens of every datum of the batch."""
        return self.prefix + sum(lengths[i] - self.prefix for i in self.members)


def shareable_prefix(datum: Datum) -> Ints:
    """The tokens that a datum can share with others: all up to and including the first position that counts.

    This is the only definition of a shared prefix. A sampled datum's shareable prefix is its prompt. Positions of
    weight 0 or `REPORTED_WEIGHT` do not count; without others it is the whole datum.
    """
    counting = np.flatnonzero(np.abs(datum.weights) > REPORTED_WEIGHT)
    return datum.tokens[: counting[0] + 1] if len(counting) else datum.tokens


def _prefix_key(datum: Datum) -> bytes:
    """Equal for datums that share their prefix, and what is reported of it."""
    prefix = shareable_prefix(datum)
    reported = datum.weights[: len(prefix)] == REPORTED_WEIGHT
    targets = np.where(reported, datum.loss_inputs["target_tokens"][: len(prefix)], -1)
    return prefix.tobytes() + (targets.tobytes() if reported.any() else b"")


def group_by_prefix(batch: Sequence[Datum], *, share_prefixes: bool = True) -> list[PrefixGroup]:
    """Groups the datums that have the same shareable prefix, in the order of each group's first member.

    Without `share_prefixes` every datum is a group of its own.
    """
    if not share_prefixes:
        return [PrefixGroup(0, (i,)) for i in range(len(batch))]
    groups: dict[bytes, list[int]] = {}
    for i, datum in enumerate(batch):
        groups.setdefault(_prefix_key(datum), []).append(i)
    return [
        PrefixGroup(len(shareable_prefix(batch[members[0]])) if len(members) > 1 else 0, tuple(members))
        for members in groups.values()
    ]


@dataclass(frozen=True, slots=True)
class Document:
    """A segment of a row whose tokens attend to no other segment but the opening: a prefix followed by its suffixes.

    A suffix attends to the prefix and to itself, but not to other suffixes.
    """

    prefix: int
    """Number of tokens of the prefix."""
    suffixes: tuple[int, ...] = ()
    """Number of tokens of each suffix; may be 0."""
    opening: int = 0
    """Number of tokens at the start of the row that the document attends to as if it began with them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole document, without the opening."""
        return self.prefix + sum(self.suffixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """The datums of one micro-batch as consecutive documents, with the loss inputs of the scored positions."""

    tokens: Ints
    """[L]"""
    positions: Ints
    """[L] position within the datum; a suffix continues the count of its prefix."""
    documents: tuple[Document, ...]
    """The documents in order; their numbers of tokens add up to L."""
    lengths: tuple[int, ...]
    """T of each datum, in the order of the micro-batch."""
    scored: Ints
    """[S] index into the row. The last token of a prefix occurs once per member: it predicts each one's next token."""
    datum_index: Ints
    """[S] index of the datum that the position belongs to."""
    datum_position: Ints
    """[S] position within that datum."""
    loss_inputs: Mapping[str, NDArray[Any]]
    """Name -> [S]; always holds `target_tokens` and `weights`."""
    copies: tuple[Ints, Ints]
    """Positions that are reported of a shared prefix, and those of its first datum, whose values they have: indices
    into the concatenation of all datums."""

    def unpack(self, values: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """[S] values of the scored positions -> one [T] array per datum, 0 where nothing is scored."""
        starts = np.cumsum((0, *self.lengths))
        flat = np.zeros(starts[-1], dtype=np.float32)
        flat[starts[self.datum_index] + self.datum_position] = values
        flat[self.copies[0]] = flat[self.copies[1]]
        return np.split(flat, starts[1:-1])


def common_opening(datums: Sequence[Datum], groups: Sequence[PrefixGroup]) -> int:
    """Number of tokens that all datums begin with and that can be computed once for all; 0 if it is not worth it.

    The last token of a shareable prefix is not among them, because it is scored.
    """
    if len(groups) < 2:
        return 0
    prefixes = [shareable_prefix(datums[group.members[0]]) for group in groups]
    shortest = min(map(len, prefixes)) - 1
    alike = np.all([prefix[:shortest] == prefixes[0][:shortest] for prefix in prefixes], axis=0)
    length = shortest if alike.all() else int(alike.argmin())
    return length if length >= _SHORTEST_OPENING else 0


def pack_row(datums: Sequence[Datum], *, share_prefixes: bool, share_opening: bool = False) -> PackedRow:
    """Packs one micro-batch of at least one datum. All datums must have the same loss inputs.

    With `share_opening`, tokens that all datums begin with are a document of their own, at the start of the row.
    A rank is sent only the datums of its micro-batches, so they are grouped again, which finds the groups of the plan.
    """
    groups = group_by_prefix(datums, share_prefixes=share_prefixes)
    opening = common_opening(datums, groups) if share_opening else 0
    tokens: list[Ints] = [datums[0].tokens[:opening]]
    positions: list[Ints] = [np.arange(opening)]
    scored: list[Ints] = []
    datum_index: list[Ints] = []
    datum_position: list[Ints] = []
    documents: list[Document] = [Document(opening)] if opening else []
    starts = np.cumsum((0, *(len(datum.tokens) for datum in datums)))
    copies: list[tuple[Ints, Ints]] = []
    start = opening  # of the next suffix or document in the row
    for group in groups:
        prefix = max(group.prefix, opening)
        tokens.append(datums[group.members[0]].tokens[opening:prefix])
        positions.append(np.arange(opening, prefix))
        prefix_start, start = start - opening, start + prefix - opening
        for i in group.members:
            datum = datums[i]
            tokens.append(datum.tokens[prefix:])
            positions.append(np.arange(prefix, len(datum.tokens)))
            scored_here = np.flatnonzero(datum.weights)
            reported = (scored_here < group.prefix) & (datum.weights[scored_here] == REPORTED_WEIGHT)
            if i != group.members[0]:  # what is reported of a prefix is computed for its first datum
                copies.append((starts[i] + scored_here[reported], starts[group.members[0]] + scored_here[reported]))
                scored_here = scored_here[~reported]
            scored.append(scored_here + _row_offsets(scored_here, opening, prefix, prefix_start, start))
            datum_index.append(np.full(len(scored_here), i))
            datum_position.append(scored_here)
            start += len(datum.tokens) - prefix
        suffixes = tuple(len(datums[i].tokens) - prefix for i in group.members)
        documents.append(Document(prefix - opening or suffixes[0], suffixes if prefix > opening else (), opening))
    index, position = np.concatenate(datum_index), np.concatenate(datum_position)
    return PackedRow(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        documents=tuple(documents),
        lengths=tuple(len(datum.tokens) for datum in datums),
        scored=np.concatenate(scored),
        datum_index=index,
        datum_position=position,
        loss_inputs=_gathered(datums, starts[index] + position),
        copies=(_joined([to for to, _ in copies]), _joined([origin for _, origin in copies])),
    )


def _gathered(datums: Sequence[Datum], flat: Ints) -> dict[str, NDArray[Any]]:
    """The loss inputs of positions, which are indices into the concatenation of all datums."""
    names = datums[0].loss_inputs.keys() - {"weights"}
    return {
        "weights": np.concatenate([datum.weights for datum in datums])[flat],
        **{name: np.concatenate([datum.loss_inputs[name] for datum in datums])[flat] for name in names},
    }


def _row_offsets(positions: Ints, opening: int, prefix: int, prefix_start: int, suffix_start: int) -> Ints:
    """What to add to positions of a datum for their indices in the row, where its parts stand apart."""
    in_suffix = np.full(len(positions), suffix_start - prefix)
    return np.where(positions < opening, 0, np.where(positions < prefix, prefix_start, in_suffix))


def _joined(arrays: Sequence[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


def pad_row(row: PackedRow, multiple: int) -> PackedRow:
    """Pads a row to a multiple of `multiple` tokens with documents that have no scored position.

    Their positions stay within the context of any model: a row may need more padding than that is long.
    """
    missing = -len(row.tokens) % multiple
    if not missing:
        return row
    padding = np.arange(missing)
    whole, rest = divmod(missing, _PADDING_DOCUMENT)
    return replace(
        row,
        tokens=np.concatenate([row.tokens, np.zeros_like(padding)]),
        positions=np.concatenate([row.positions, padding % _PADDING_DOCUMENT]),
        documents=(*row.documents, *[Document(_PADDING_DOCUMENT)] * whole, *[Document(rest)] * (rest > 0)),
    )
