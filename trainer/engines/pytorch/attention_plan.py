"""Cuts the documents of a packed row into tiles for `block_attention`, once per row.

A tile is some adjacent queries of a document and the keys that they may attend to, so what the causal mask hides beyond
a tile is not computed. Short documents of about the same length are padded to one length and computed together. In a
long document with suffixes, the tiles of a suffix leave out the keys of the suffixes that it does not branch off.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rl.data.packing import Document

# Short documents whose lengths have the same multiple of this above them are padded to the longest of them.
_LENGTH_MULTIPLE = 16
# Up to this many tokens a document is computed together with others, and a mask alone keeps its suffixes apart.
_SHORT_DOCUMENT = 256
# Queries of a tile. Smaller tiles compute less that the mask hides; larger ones make fewer calls.
_SHORT_TILE, _LONG_TILE = 32, 64


class Tile(NamedTuple):
    """Queries `start` to `stop - 1` of a document, and the keys that some of them attend to."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    """The first token and the token after the last, of each stretch of keys."""
    mask: Tensor
    """[1 or N, stop - start, w] float32, 0 or minus infinity, for the last w keys. N is the number of documents."""

    @property
    def num_keys(self) -> int:
        """How many keys there are."""
        return sum(stop - start for start, stop in self.keys)


class DocumentBatch(NamedTuple):
    """Documents that have the same tiles, one after the other."""

    num_documents: int
    size: int
    """Tokens of each document with its padding."""
    tiles: tuple[Tile, ...]


class AttentionPlan(NamedTuple):
    """What to compute for a row of L tokens. The tokens are first brought into the order of the batches."""

    batches: tuple[DocumentBatch, ...]
    order: Tensor | None
    """[P] int64 indices into the row of the batches' tokens; padding repeats a token. None for the row itself."""
    places: Tensor | None
    """[L] int64 indices into `order` of the row's tokens."""
    padding: Tensor | None
    """Indices into `order` of the padding, and of the copies of the opening that documents begin with."""
    copies: Tensor | None
    """[n, o] indices into `order` of n copies of the row's opening of o tokens."""


def plan_attention(documents: Sequence[Document]) -> AttentionPlan:
    """The plan for a row of these documents."""
    starts = list(itertools.accumulate((document.num_tokens for document in documents), initial=0))
    num_tokens = starts[-1]
    # From here on every document begins with its own copy of the opening.
    openings = [document.opening for document in documents]
    starts = [start - opening for start, opening in zip(starts, openings, strict=False)]
    documents = [replace(d, prefix=d.opening + d.prefix, opening=0) for d in documents]
    long = [i for i, document in enumerate(documents) if document.num_tokens > _SHORT_DOCUMENT]
    short: dict[tuple[int, bool], list[int]] = {}
    for i, document in enumerate(documents):
        if 0 < document.num_tokens <= _SHORT_DOCUMENT:
            short.setdefault((-(-document.num_tokens // _LENGTH_MULTIPLE), bool(document.suffixes)), []).append(i)
    groups = [[i] for i in long] + list(short.values())
    batches = [_one_document(documents[i]) for i in long]
    batches += [_short_documents([documents[i] for i in members]) for members in short.values()]
    order: list[Tensor] = []
    is_real: list[Tensor] = []
    is_copy: list[Tensor] = []
    for batch, members in zip(batches, groups, strict=True):
        start, opening, length = (
            torch.tensor(x)[:, None]
            for x in zip(*((starts[i], openings[i], documents[i].num_tokens) for i in members), strict=True)
        )
        within = torch.arange(batch.size)
        copied = (within < opening).expand(len(members), -1)
        order.append(torch.where(copied, within, start + within.minimum(length - 1)).flatten())
        is_real.append((~copied & (within < length)).flatten())
        is_copy.append(copied.flatten())
    rows, real, copy = torch.cat(order), torch.cat(is_real), torch.cat(is_copy)
    if torch.equal(rows, torch.arange(num_tokens)):
        return AttentionPlan(tuple(batches), None, None, None, None)
    places = real.nonzero()[:, 0]
    return AttentionPlan(
        tuple(batches),
        rows,
        places[rows[places].argsort()],
        None if bool(real.all()) else (~real).nonzero()[:, 0],
        copy.nonzero().view(-1, max(openings)) if bool(copy.any()) else None,
    )


def document_mask(document: Document, first: int, stop: int) -> Tensor:
    """[stop - first, stop] bool: which tokens of a document its tokens `first` to `stop - 1` may attend to."""
    mask = torch.ones(stop - first, stop, dtype=torch.bool).tril(first)
    if document.suffixes:
        mask &= torch.arange(first, stop)[:, None] < torch.from_numpy(document.seen_until()[:stop])
    return mask


def _short_documents(documents: Sequence[Document]) -> DocumentBatch:
    """Documents of similar length, all with suffixes or all without, padded to the longest."""
    size = max(document.num_tokens for document in documents)
    parts = _cut(0, size, _SHORT_TILE)
    if not documents[0].suffixes:
        return DocumentBatch(len(documents), size, tuple(_causal_tile(s, e) for s, e in parts))
    allowed = torch.ones(len(documents), size, size, dtype=torch.bool).tril()  # padding has to attend to something
    for mask, document in zip(allowed, documents, strict=True):
        mask[: document.num_tokens, : document.num_tokens] = document_mask(document, 0, document.num_tokens)
    return DocumentBatch(
        len(documents), size, tuple(Tile(s, e, ((0, e),), _added(allowed[:, s:e, :e])) for s, e in parts)
    )


def _one_document(document: Document) -> DocumentBatch:
    prefix, size = document.prefix, document.num_tokens
    tiles = [_causal_tile(s, e) for s, e in _cut(0, prefix, _LONG_TILE)]
    segments = document.segments()
    for s, e in _cut(prefix, size, _LONG_TILE):
        # What the first query attends to, and what comes after its suffix began, is all that any query attends to.
        own = next(start for start, stop, _ in segments if s < stop)
        keys = [(start, stop) for start, stop, until in segments if start < own and s < until] + [(own, e)]
        mask = document_mask(document, s, e)
        masked = torch.cat([mask[:, start:stop] for start, stop in keys[1:]], dim=1)
        tiles.append(Tile(s, e, _joined(keys), _added(masked[None])))
    return DocumentBatch(1, size, tuple(tiles))


def _joined(stretches: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Stretches in ascending order, those that adjoin as one."""
    joined = [stretches[0]]
    for start, stop in stretches[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _causal_tile(start: int, stop: int) -> Tile:
    """A tile where only the causal mask applies."""
    size = stop - start
    return Tile(start, stop, ((0, stop),), _added(torch.ones(1, size, size, dtype=torch.bool).tril()))


def _cut(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(s, min(s + size, stop)) for s in range(start, stop, size)]


def _added(allowed: Tensor) -> Tensor:
    """A mask in the form that is added to scores."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
