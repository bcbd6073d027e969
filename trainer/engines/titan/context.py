"""Context parallelism: the ranks of a group compute the positions of one row together.

A row of L tokens is cut into 2n equal chunks, and rank r of n takes chunks r and 2n - 1 - r, so that all ranks compute
about the same amount of causal attention (the problem: arXiv 2309.14509; this split: Llama 3, arXiv 2407.21783, section
3.3.2). Keys and values are gathered within attention. Log-probs are gathered before the loss, which every rank computes
for the whole row.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.data.packing import Document
from trainer.config import TrainerConfig
from trainer.engines.pytorch.attention_plan import document_mask

# Positions per block of a block mask, on a GPU.
_BLOCK = 128
# torchao's float8 kernels need the inner size of a product to be a multiple of this.
_FLOAT8_MULTIPLE = 16


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


def row_multiple(config: TrainerConfig, device: torch.device) -> int:
    """The number of which a row's length must be a multiple, for equal shards and for float8."""
    if config.context_parallel == 1:
        # Experts take their tokens from equal parts of the sequence; stages exchange equal parts of it.
        parts = config.tensor_parallel if config.expert_parallel > 1 or config.pipeline_parallel > 1 else 1
        # The gradient of a float8 weight sums over tokens, which its kernel takes in multiples.
        return math.lcm(parts, _FLOAT8_MULTIPLE if config.float8 != "none" else 1)
    block = 1 if device.type == "cpu" else _BLOCK
    return 2 * config.context_parallel * config.tensor_parallel * block


def row_length(length: int, multiple: int) -> int:
    """The length to which a row of this many tokens is padded for a kernel that is compiled for its lengths.

    There are at most 8 lengths between a number and its double, so that a run soon has seen all of them; less than an
    eighth of a row is padding, beside what `multiple` needs.
    """
    step = 1 << max(0, length.bit_length() - 4)
    stepped = -(-length // step) * step
    return -(-stepped // multiple) * multiple


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
    mask: Tensor
    """[size, last_key - first_key] bool, true where a position may attend to a key."""


class ContextMasks(NamedTuple):
    """What attention on the CPU needs to know about a rank's shard."""

    restore: Tensor
    """[L] indices that put gathered keys and values back into the order of the row."""
    pieces: tuple[Piece, ...]
    """Concatenated, they make up the shard."""


def context_masks(documents: Sequence[Document], shard: RowShard) -> ContextMasks:
    """The masks of a shard. `documents` are all documents of the row."""
    starts = torch.cumsum(torch.tensor([0, *(document.num_tokens for document in documents)]), 0)
    owner = torch.searchsorted(starts, shard.rows, right=True) - 1
    new_piece = (shard.rows.diff() != 1) | (owner.diff() != 0)
    bounds = [0, *(new_piece.nonzero()[:, 0] + 1).tolist(), len(shard.rows)]
    pieces: list[Piece] = []
    for begin, end in itertools.pairwise(bounds):
        document, start = documents[int(owner[begin])], int(starts[owner[begin]])
        first, stop = int(shard.rows[begin]), int(shard.rows[end - 1]) + 1
        pieces.append(Piece(end - begin, start, stop, document_mask(document, first - start, stop - start)))
    return ContextMasks(shard.order.argsort(), tuple(pieces))
