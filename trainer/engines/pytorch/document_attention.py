"""The one place that chooses how attention over a packed row is computed on the CPU, document by document.

`python -m benchmarks.attention` measures the ways to compute it, for documents of every length, and the choice.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from rl.data.packing import Document
from rl.system.hardware import has_fast_bfloat16
from trainer.engines.pytorch.attention_plan import AttentionPlan, plan_attention
from trainer.engines.pytorch.block_attention import block_attention

# Above this many tokens PyTorch's kernel takes less time for a document without suffixes.
_LONG_DOCUMENT = 640


class RowPart(NamedTuple):
    """Adjacent documents of a row that are computed in the same way."""

    num_tokens: int
    plan: AttentionPlan | None
    """None for one document that PyTorch's kernel computes."""


def plan_row(documents: Sequence[Document]) -> tuple[RowPart, ...]:
    """Chooses for each document of a row, once for all layers. With an opening, all documents are computed together."""
    if any(document.opening for document in documents):
        return (RowPart(sum(document.num_tokens for document in documents), plan_attention(documents)),)
    parts: list[RowPart] = []
    for is_long, group in itertools.groupby(documents, _is_long):
        members = list(group)
        if is_long:
            parts += [RowPart(document.num_tokens, None) for document in members]
        else:
            parts.append(RowPart(sum(document.num_tokens for document in members), plan_attention(members)))
    return tuple(parts)


def document_attention(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[RowPart], *, scale: float | None) -> Tensor:
    """q [1, L, heads, D], k and v [1, L, key-value heads, D] -> [1, L, heads, D], for a row planned as `parts`."""
    if len(parts) == 1:  # the gradient of a split is a copy, even of a split into one part
        return _attend(q, k, v, parts[0], scale)
    sizes = [part.num_tokens for part in parts]
    split = zip(q.split(sizes, dim=1), k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True)
    return torch.cat([_attend(*each, part, scale) for each, part in zip(split, parts, strict=True)], dim=1)


def _is_long(document: Document) -> bool:
    return not document.suffixes and document.num_tokens > _LONG_DOCUMENT


def _attend(q: Tensor, k: Tensor, v: Tensor, part: RowPart, scale: float | None) -> Tensor:
    """The attention of a part of a row, in the way chosen for it. Squeezing has a gradient without a copy."""
    dtype = product_dtype(q.dtype)
    if part.plan is None:
        return _kernel_attention(q, k, v, scale=scale, dtype=dtype)
    return block_attention(q.squeeze(0), k.squeeze(0), v.squeeze(0), part.plan, scale=scale, dtype=dtype)[None]


def _kernel_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, dtype: torch.dtype) -> Tensor:
    """PyTorch's kernel for one document: [1, T, heads, D] each."""
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2).to(q.dtype)


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: float32 for bfloat16 inputs where the processor is faster in float32."""
    return torch.float32 if dtype == torch.bfloat16 and not has_fast_bfloat16() else dtype
