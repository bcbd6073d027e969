"""Attention on the CPU by plain matrix products over tiles, whose backward pass takes about twice its forward pass.

`plan_attention` cuts the documents of a packed row into tiles, once per row, and `block_attention` computes them. A
tile is some adjacent queries of a document and the keys that they may attend to. What the causal mask hides beyond a
tile is not computed. Short documents of about the same length are padded to one length and computed together. In a long
document with suffixes, the tiles of a suffix leave out the keys of the suffixes that it does not branch off.

The scores of a tile stay in the cache. The backward pass computes them again, so that memory is linear in the tokens of
a row (the idea: FlashAttention, arXiv 2205.14135). A tile sees all keys of its queries at once, so its softmax is an
ordinary one.

Legend: L tokens of the row, N documents of a batch, T tokens of each, G key-value heads, R query heads for each of
them, D head dimension of queries and keys, V of values, B queries and K keys of a tile, M = N * G pairs of a document
and a key-value head, of which a part has m.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from rl.data.packing import Document

# Short documents whose lengths have the same multiple of this above them are padded to the longest of them.
_LENGTH_MULTIPLE = 16
# Up to this many tokens a document is computed together with others, and a mask alone keeps its suffixes apart.
_SHORT_DOCUMENT = 256
# Queries of a tile. Smaller tiles compute less that the mask hides; larger ones make fewer calls.
_SHORT_TILE, _LONG_TILE = 32, 64
# Scores that are computed at once: 1 MB, which stays in the cache.
_CHUNK_SCORES = 1 << 18


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
    """Stretches in ascending order; adjoining ones are joined."""
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


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *, scale: float | None, dtype: torch.dtype
) -> Tensor:
    """Attention within the documents of a row: q [L, G * R, D], k [L, G, D] and v [L, G, V] -> [L, G * R, V].

    Scores and their softmax are computed in float32, the other products in `dtype`.
    """
    result: Any = _BlockAttention.apply(q, k, v, plan, q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    return result


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale, ctx.dtype = plan, scale, dtype
        # Selective activation checkpointing would keep all scores, because it watches for `bmm` and keeps its results.
        with no_dispatch():
            return _attend(q, k, v, plan, scale, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan: AttentionPlan = ctx.plan
        dtype: torch.dtype = ctx.dtype
        q, k, v, grad_out = (_in_order(x, plan.order) for x in (*ctx.saved_tensors, grads[0]))
        if plan.padding is not None:
            grad_out.index_fill_(0, plan.padding, 0.0)
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for batch, rows in _batches(plan):
            queries, keys, values = _load_all(q[rows], k[rows], v[rows], batch, ctx.scale, dtype)
            grad_outputs = _load(grad_out[rows], batch, k.shape[1], dtype)
            grad_queries, grad_keys, grad_values = (
                torch.empty_like(queries),
                *(torch.zeros(x.shape) for x in (keys, values)),
            )
            for part in _parts(batch, k.shape[1], q.shape[1] // k.shape[1]):
                part_queries, part_keys, part_grad = queries[part.rows], part.keys_of(keys), grad_outputs[part.rows]
                probs = part.probs(part_queries, part_keys)
                grad_probs = torch.bmm(part_grad, part.keys_of(values).transpose(1, 2)).float()
                grad_scores = torch.ops.aten._softmax_backward_data(grad_probs, probs, -1, torch.float32).to(dtype)
                part.add_to_keys(grad_values, torch.bmm(probs.to(dtype).transpose(1, 2), part_grad))
                part.add_to_keys(grad_keys, torch.bmm(grad_scores.transpose(1, 2), part_queries.to(dtype)))
                grad_queries[part.rows] = torch.bmm(grad_scores, part_keys.to(dtype))
            _store(grad_q[rows], grad_queries, batch)
            _store(grad_k[rows], grad_keys.mul_(ctx.scale), batch)
            _store(grad_v[rows], grad_values, batch)
        results = [_in_order(x, plan.places) for x in (grad_q, grad_k, grad_v)]
        if plan.copies is not None:
            for result, grad in zip(results[1:], (grad_k, grad_v), strict=True):
                opening = result[: plan.copies.shape[1]]
                opening.copy_(opening.float() + grad[plan.copies].float().sum(0))
        return *results, None, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, dtype: torch.dtype) -> Tensor:
    """The forward pass."""
    q, k, v = (_in_order(x, plan.order) for x in (q, k, v))
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
    for batch, rows in _batches(plan):
        queries, keys, values = _load_all(q[rows], k[rows], v[rows], batch, scale, dtype)
        outputs = torch.empty(*queries.shape[:2], v.shape[2], dtype=dtype)
        for part in _parts(batch, k.shape[1], q.shape[1] // k.shape[1]):
            probs = part.probs(queries[part.rows], part.keys_of(keys))
            outputs[part.rows] = torch.bmm(probs.to(dtype), part.keys_of(values))
        _store(out[rows], outputs, batch)
    return _in_order(out, plan.places)


class _Part(NamedTuple):
    """What is computed at once: one tile of some documents and heads."""

    tile: Tile
    pairs: slice
    """Which m of the M pairs."""
    rows: tuple[slice, slice]
    """The tile's queries in [M, T * R, D]."""
    mask: Tensor
    """[1 or the part's documents, 1, B, 1, w]"""

    def keys_of(self, x: Tensor) -> Tensor:
        """[M, T, D] -> [m, K, D]"""
        stretches = [x[self.pairs, start:stop] for start, stop in self.tile.keys]
        return stretches[0] if len(stretches) == 1 else torch.cat(stretches, dim=1)

    def add_to_keys(self, x: Tensor, update: Tensor) -> None:
        """Adds [m, K, D] to the tile's keys of x [M, T, D]."""
        done = 0
        for start, stop in self.tile.keys:
            x[self.pairs, start:stop].add_(update[:, done : done + stop - start])
            done += stop - start

    def probs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """queries [m, B * R, D] and keys [m, K, D] -> [m, B * R, K] float32"""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        size, num_masked = self.mask.shape[2], self.mask.shape[-1]
        scores.view(len(self.mask), -1, size, queries.shape[1] // size, keys.shape[1])[..., -num_masked:] += self.mask
        return torch.softmax(scores, -1)


def _parts(batch: DocumentBatch, num_heads: int, num_shared: int) -> Iterator[_Part]:
    """Cuts a batch's tiles into parts. `num_heads` is G, `num_shared` is R."""
    num_pairs = batch.num_documents * num_heads
    for tile in batch.tiles:
        own_masks = len(tile.mask) > 1
        unit = num_heads if own_masks else 1  # documents with masks of their own are not cut between heads
        rows = slice(tile.start * num_shared, tile.stop * num_shared)
        num_scores = unit * (rows.stop - rows.start) * tile.num_keys
        step = unit * max(1, _CHUNK_SCORES // num_scores)
        for start in range(0, num_pairs, step):
            pairs = slice(start, start + step)
            mask = tile.mask[start // unit : (start + step) // unit] if own_masks else tile.mask
            yield _Part(tile, pairs, (pairs, rows), mask[:, None, :, None])


def _batches(plan: AttentionPlan) -> Iterator[tuple[DocumentBatch, slice]]:
    """Each batch with its tokens."""
    start = 0
    for batch in plan.batches:
        stop = start + batch.num_documents * batch.size
        yield batch, slice(start, stop)
        start = stop


def _in_order(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x.index_select(0, order)


def _load_all(
    q: Tensor, k: Tensor, v: Tensor, batch: DocumentBatch, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, scaled keys, both float32, and values."""
    queries, keys = (_load(x, batch, k.shape[1], torch.float32) for x in (q, k))
    return queries, keys.mul_(scale), _load(v, batch, k.shape[1], dtype)


def _load(x: Tensor, batch: DocumentBatch, num_heads: int, dtype: torch.dtype) -> Tensor:
    """[N * T, G * R, D] -> [M, T * R, D], heads first. R is 1 for keys and values."""
    tokens = x.view(batch.num_documents, batch.size, num_heads, -1, x.shape[-1]).transpose(1, 2)
    return torch.empty(tokens.shape, dtype=dtype).copy_(tokens).view(batch.num_documents * num_heads, -1, x.shape[-1])


def _store(x: Tensor, value: Tensor, batch: DocumentBatch) -> None:
    """Copies [M, T * R, D] into x [N * T, G * R, D]."""
    num_heads = len(value) // batch.num_documents
    tokens = value.view(batch.num_documents, num_heads, batch.size, -1, x.shape[-1]).transpose(1, 2)
    x.view(tokens.shape).copy_(tokens)
