"""The one place that chooses how attention over a packed row is computed.

On the CPU, each document of the row is computed by PyTorch's kernel or in tiles (`block_attention.py`);
`python -m benchmarks.attention` measures both for documents of every length, and the choice.

On an NVIDIA GPU, FlashAttention computes documents in bfloat16: the fastest that the GPU can run and that is installed.
FlashAttention 2 is part of torch. FlashAttention 3 (Hopper, arXiv 2407.08608) and 4 (Blackwell) are packages of their
own, which the registries do not have for every torch, so neither is required. FlexAttention computes documents that
share a prefix; `segment_mask` is its mask.

Legend: L tokens of the row.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from rl.data.packing import Document
from rl.system.hardware import has_fast_bfloat16
from trainer.engines.pytorch.block_attention import AttentionPlan, block_attention, plan_attention

# Above this many tokens PyTorch's kernel takes less time for a document without suffixes.
_LONG_DOCUMENT = 640
_FASTER: tuple[tuple[str, tuple[int, int], str], ...] = (
    ("FA4", (10, 0), "flash_attn.cute.interface"),
    ("FA3", (9, 0), "flash_attn_interface"),
)
"""Implementations as torch names them, the least compute capability of each, and the module that it needs."""
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key) indices -> whether the query may attend to the key."""


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
    """q [1, L, heads, D], k [1, L, key-value heads, D] and v -> [1, L, heads, D], for a row planned as `parts`.

    Values may be narrower than keys, and so is the result then.
    """
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
    """PyTorch's kernel for one document: [1, T, heads, D] each. It takes values as wide as keys."""
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    queries, keys, values = (x.to(dtype).transpose(1, 2) for x in (q, k, padded))
    output = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)[..., : v.shape[-1]].to(q.dtype)


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: float32 for bfloat16 inputs where the processor is faster in float32."""
    return torch.float32 if dtype == torch.bfloat16 and not has_fast_bfloat16() else dtype


def choose_flash_attention(
    capability: tuple[int, int], has_module: Callable[[str], bool]
) -> tuple[str | None, str | None]:
    """The implementation for a GPU, None for torch's own, and a sentence on a faster one that is not installed."""
    advice: str | None = None
    for name, least, module in _FASTER:
        if capability < least:
            continue
        if has_module(module):
            return name, advice
        advice = advice or f"{name} would be faster on this GPU; it needs the module {module}, which is not installed"
    return None, advice


@cache
def installed_flash_attention() -> str | None:
    """The implementation for this machine's GPU, in torch's terms; None for torch's own, or without a GPU.

    Says once, in the trainer's log, which one runs.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    name, advice = choose_flash_attention(torch.cuda.get_device_capability(), _has_module)
    print(f"attention: {name or 'FA2, of torch'}" + (f" ({advice})" if advice else ""), flush=True)
    return name


def _has_module(name: str) -> bool:
    """Whether a module can be imported. Imports the packages above it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def segment_mask(documents: Sequence[Document], device: torch.device) -> MaskFunction:
    """The mask of a row of these documents. Its tensors lie on `device`."""
    sizes = [document.num_tokens for document in documents]
    starts = np.cumsum((0, *sizes))
    until = np.concatenate([d.seen_until() + start for d, start in zip(documents, starts, strict=False)])
    opening = np.repeat([document.opening for document in documents], sizes)
    seen_until, opening_of = torch.from_numpy(until).to(device), torch.from_numpy(opening).to(device)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        return (key <= query) & ((query < seen_until[key]) | (key < opening_of[query]))

    return mask


class Bounds:
    """Where the documents of a row begin and end."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are the numbers of tokens of the documents, in the order of the row."""
        self.ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
        self.sizes = tuple(sizes)
        self.refused = ""
        """Why a layer's attention could not be computed, if it could not; its output is worth nothing then."""


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bounds: Bounds, *, scale: float | None, window_size: tuple[int, int]
) -> Tensor:
    """q [L, heads, D], k and v [L, key-value heads, D] -> [L, heads, D], causal and within documents.

    A sink [heads] is the logit of one more key, whose value is 0. A query sees itself and `window_size[0]` tokens
    before it; with -1, all of them.
    """
    if q.is_cuda and q.dtype != torch.float32:
        out: Any = _FlashWithSinks.apply(q, k, v, sinks, bounds.ends, max(bounds.sizes), scale, window_size)
        return out
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outputs: list[Tensor] = []
    for queries, keys, values in zip(*(x.transpose(0, 1).split(bounds.sizes, 1) for x in (q, k, v)), strict=True):
        logits = queries @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        size = logits.shape[1]
        logits = logits.masked_fill(~allowed_keys(size, window_size, q.device), -torch.inf)
        sink = sinks.to(logits.dtype)[:, None, None].expand(-1, size, 1)
        probs = torch.cat([logits, sink], -1).softmax(-1, torch.float32)[..., :-1]
        outputs.append((probs.to(values.dtype) @ values).transpose(0, 1))
    return torch.cat(outputs)


class _FlashWithSinks(torch.autograd.Function):
    """FlashAttention over documents with sinks. torch's `varlen_attn` has no gradient of the log-sum-exp.

    With l the log-sum-exp of a query's logits, s the sink and l' = log(exp l + exp s), the output o' is exp(l - l') o.
    FlashAttention's backward pass (https://arxiv.org/abs/2205.14135, algorithm 4) computes probabilities from l and
    subtracts do . o; given l' and o' instead, it returns the gradients with the sink. That of s is the sum of
    -exp(s - l') (do . o').
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        ends: Tensor,
        longest: int,
        scale: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        ctx.options = (longest, longest, window == (-1, 0))
        ctx.more = (scale, list(window))
        out, lse, state = torch.ops.torch_attn._varlen_attn(q, k, v, ends, ends, *ctx.options, *ctx.more, True)
        whole = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, L]
        out = (out.float() * (lse - whole).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, ends, out, whole, state)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, ends, out, whole, state = ctx.saved_tensors
        grad = grads[0].contiguous()
        of_inputs = torch.ops.torch_attn._varlen_attn_backward(
            grad, q, k, v, out, whole, ends, ends, *ctx.options, state, *ctx.more
        )
        seen = (grad.float() * out.float()).sum(-1).T  # [heads, L]
        of_sinks = -((sinks.float()[:, None] - whole).exp() * seen).sum(-1)
        return (*of_inputs, of_sinks.to(sinks.dtype), None, None, None, None)


def allowed_keys(size: int, window_size: tuple[int, int], device: torch.device) -> Tensor:
    """[T, T] whether a query of a document may attend to a key."""
    allowed = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return allowed.triu(-window_size[0]) if window_size[0] >= 0 else allowed
