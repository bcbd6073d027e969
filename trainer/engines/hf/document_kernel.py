"""Attention for transformers models that takes a packed row document by document, without an L x L mask.

transformers hands unknown keyword arguments of a model down to its attention function, and builds no mask for a
function that it has no mask for. Both are documented ways to bring attention of one's own:
https://huggingface.co/docs/transformers/en/attention_interface
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from trainer.engines.pytorch.document_attention import installed_flash_attention

NAME = "ownloop_documents"
"""As which transformers knows the function."""

_BOUNDS = "document_bounds"
_UNSUPPORTED = ("softcap",)


class Bounds:
    """Where the documents of a row begin and end."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are the numbers of tokens of the documents, in the order of the row."""
        self.ends = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=device)
        self.sizes = tuple(sizes)
        self.refused = ""
        """Why a layer's attention could not be computed, if it could not; its output is worth nothing then."""


def prepare_kernel(device: torch.device) -> None:
    """Makes the function known to transformers, and chooses the FlashAttention of this GPU."""
    AttentionInterface.register(NAME, attend)
    faster = installed_flash_attention() if device.type == "cuda" else None
    if faster is not None and current_flash_attention_impl() != faster:
        activate_flash_attention_impl(faster)


def arguments(bounds: Bounds | None) -> Mapping[str, Any]:
    """What a model's forward pass takes so that `attend` gets it; nothing for transformers' own attention."""
    return {} if bounds is None else {_BOUNDS: bounds}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    document_bounds: Bounds | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, L, D], key and value [1, key-value heads, L, D] -> [1, L, heads, D].

    `s_aux` [heads] are sinks, as gpt-oss has: the logit of one more key, whose value is 0, for each head. Raises
    nothing, because FSDP would be left with gathered parameters: `Bounds.refused` says what went wrong.
    """
    if document_bounds is None:  # a model that does not hand its arguments down
        return query.transpose(1, 2), None
    document_bounds.refused = _refusal(module, attention_mask, query, value, options) or document_bounds.refused
    if document_bounds.refused:
        return query.transpose(1, 2), None
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = max(document_bounds.sizes)
    ends = document_bounds.ends
    if s_aux is not None:
        if query.is_cuda:
            out: Any = _FlashWithSinks.apply(q, k, v, s_aux, ends, longest, scaling, window)
        else:
            out = sinks_on_cpu(q, k, v, s_aux, ends, scale=scaling, window_size=window)
        return out[None], None
    kernel = varlen_attn if query.is_cuda else varlen_on_cpu
    out = kernel(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out[None], None


def _refusal(module: nn.Module, mask: Tensor | None, query: Tensor, value: Tensor, options: Mapping[str, Any]) -> str:
    """Why `attend` cannot compute what is asked; empty if it can."""
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if asked:
        return f"its attention has {asked[0]}"
    if mask is not None or not getattr(module, "is_causal", True):
        return "its attention has a mask of its own"
    if len(query) != 1 or value.shape[-1] != query.shape[-1] or query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"its heads have {query.shape[-1]} dimensions"
    return ""


def varlen_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, scale: float | None, window_size: tuple[int, int], **__: Any
) -> Tensor:
    """What `varlen_attn` computes, for tests: that has no kernel on the CPU."""
    outputs: list[Tensor] = []
    for start, stop in itertools.pairwise(ends.tolist()):
        queries, keys, values = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        allowed = _allowed(stop - start, window_size)
        out = F.scaled_dot_product_attention(queries, keys, values, allowed, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _allowed(size: int, window_size: tuple[int, int]) -> Tensor:
    """[T, T] whether a query of a document may attend to a key."""
    allowed = torch.ones(size, size, dtype=torch.bool).tril()
    return allowed.triu(-window_size[0]) if window_size[0] >= 0 else allowed


def sinks_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ends: Tensor, *, scale: float | None, window_size: tuple[int, int]
) -> Tensor:
    """q [L, heads, D], k and v [L, key-value heads, D], sinks [heads] -> [L, heads, D], in plain PyTorch."""
    groups = q.shape[1] // k.shape[1]
    outputs: list[Tensor] = []
    for start, stop in itertools.pairwise(ends.tolist()):
        queries, keys, values = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        logits = queries @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        logits = logits.masked_fill(~_allowed(stop - start, window_size), -torch.inf)
        sink = sinks.to(logits.dtype)[:, None, None].expand(-1, stop - start, 1)
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
