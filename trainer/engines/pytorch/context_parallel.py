"""Context parallelism: the ranks of a group compute the positions of one row together.

A row of L tokens is cut into 2n equal chunks, and rank r of n takes chunks r and 2n - 1 - r, so that all ranks compute
about the same amount of causal attention (the problem: arXiv 2309.14509; this split: Llama 3, arXiv 2407.21783, section
3.3.2). Keys and values are gathered within attention. Log-probs are gathered before the loss, which every rank computes
for the whole row.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from rl.data.packing import Document
from trainer.engines.pytorch.block_attention import document_mask


class RowShard(NamedTuple):
    """The positions of a row that one rank computes, in the order in which it computes them."""

    rows: Tensor
    """[L / n] int64 indices into the row."""
    order: Tensor
    """[L] int64 indices into the row, rank after rank, which is the order of gathered keys and values."""
    scored: Tensor
    """[s] int64 indices into `rows` of the scored positions among them."""
    where: Tensor
    """[s] int64 indices of these among the row's scored positions."""


def shard_row(length: int, scored: Tensor, rank: int, num_ranks: int) -> RowShard:
    """A rank's shard of a row. `length` is a multiple of 2 * num_ranks, and `scored` [S] are indices into the row."""
    chunks = torch.arange(length, device=scored.device).chunk(2 * num_ranks)
    shards = [torch.cat([chunks[r], chunks[2 * num_ranks - 1 - r]]) for r in range(num_ranks)]
    order, rows = torch.cat(shards), shards[rank]
    place = order.argsort()[scored] - rank * len(rows)
    where = ((place >= 0) & (place < len(rows))).nonzero()[:, 0]
    return RowShard(rows, order, place[where], where)


def gather_scored(values: Tensor, shard: RowShard, num_scored: int, group: dist.ProcessGroup) -> Tensor:
    """[s] values of a rank's scored positions -> [S] values of the row's, on every rank.

    Gradients are not summed over ranks, because every rank computes the same loss from the same values.
    """
    result: Any = _GatherScored.apply(values, shard.where, num_scored, group)
    return result


class _GatherScored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, where: Tensor, num_scored: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(where)
        whole = values.new_zeros(num_scored).index_copy_(0, where, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (where,) = ctx.saved_tensors
        return grads[0][where], None, None, None


class Piece(NamedTuple):
    """Adjacent positions of a shard that belong to one document."""

    size: int
    first_key: int
    last_key: int
    """The positions may attend to the keys first_key to last_key - 1, as indices into the row."""
    mask: Tensor | None
    """[size, last_key - first_key] bool, true where a position may attend to a key. None on a GPU, whose kernel needs
    no mask for the causal attention of a document without suffixes."""


class ContextMasks(NamedTuple):
    """What attention needs to know about a rank's shard."""

    restore: Tensor
    """[L] indices that put gathered keys and values back into the order of the row."""
    pieces: tuple[Piece, ...]
    """Concatenated, they make up the shard."""


def context_masks(documents: Sequence[Document], shard: RowShard) -> ContextMasks:
    """The masks of a shard. `documents` are all documents of the row; on a GPU they have no suffixes."""
    on_cpu = shard.rows.device.type == "cpu"
    rows = shard.rows.cpu()
    starts = torch.cumsum(torch.tensor([0, *(document.num_tokens for document in documents)]), 0)
    owner = torch.searchsorted(starts, rows, right=True) - 1
    new_piece = (rows.diff() != 1) | (owner.diff() != 0)
    bounds = [0, *(new_piece.nonzero()[:, 0] + 1).tolist(), len(rows)]
    pieces: list[Piece] = []
    for begin, end in itertools.pairwise(bounds):
        document, start = documents[int(owner[begin])], int(starts[owner[begin]])
        first, stop = int(rows[begin]), int(rows[end - 1]) + 1
        mask = document_mask(document, first - start, stop - start) if on_cpu else None
        pieces.append(Piece(end - begin, start, stop, mask))
    return ContextMasks(shard.order.argsort(), tuple(pieces))


def attend_in_context(q: Tensor, k: Tensor, v: Tensor, masks: ContextMasks, *, scale: float | None) -> Tensor:
    """Attention of a rank's shard of a row.

    Takes [1, L / n, heads, head_dim] queries of the shard, and [1, L, key-value heads, head_dim] gathered keys and
    values in the order of the ranks. Returns what the queries' shape is.
    """
    q, k, v = q.transpose(1, 2), k[:, masks.restore].transpose(1, 2), v[:, masks.restore].transpose(1, 2)
    queries = q.split([piece.size for piece in masks.pieces], dim=2)
    outputs = [
        F.scaled_dot_product_attention(
            part,
            k[:, :, piece.first_key : piece.last_key],
            v[:, :, piece.first_key : piece.last_key],
            attn_mask=_lower_right(piece) if piece.mask is None else piece.mask,
            scale=scale,
            enable_gqa=True,
        )
        for part, piece in zip(queries, masks.pieces, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _lower_right(piece: Piece) -> Tensor:
    """The causal mask of the last positions of a document, as flash kernels take it."""
    return causal_lower_right(piece.size, piece.last_key - piece.first_key)
