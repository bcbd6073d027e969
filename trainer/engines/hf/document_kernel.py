"""Attention for transformers models that takes a packed row document by document, without an L x L mask.

transformers hands unknown keyword arguments of a model down to its attention function, and builds no mask for a
function that it has no mask for. Both are documented ways to bring attention of one's own:
https://huggingface.co/docs/transformers/en/attention_interface
"""

import itertools
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from trainer.engines.pytorch.document_attention import (
    Bounds,
    allowed_keys,
    attend_with_sinks,
    installed_flash_attention,
)

NAME = "ownloop_documents"
"""As which transformers knows the function."""

_BOUNDS = "document_bounds"
_UNSUPPORTED = ("softcap",)


def prepare_kernel(device: torch.device) -> None:
    """Makes the function known to transformers, and chooses the FlashAttention of this GPU."""
    AttentionInterface.register(NAME, attend)
    faster = installed_flash_attention() if device.type == "cuda" else None
    if faster is not None and current_flash_attention_impl() != faster:
        activate_flash_attention_impl(faster)


def arguments(bounds: Bounds | None) -> Mapping[str, Bounds]:
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
    **options: object,
) -> tuple[Tensor, None]:
    """query [1, heads, L, D], key and value [1, key-value heads, L, D] -> [1, L, heads, D]; values may be narrower.

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
    if s_aux is not None:
        return attend_with_sinks(q, k, v, s_aux, document_bounds, scale=scaling, window_size=window)[None], None
    longest, ends = max(document_bounds.sizes), document_bounds.ends
    kernel = varlen_attn if query.is_cuda else varlen_on_cpu
    v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # the kernel takes values as wide as keys
    out = kernel(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out[None, ..., : value.shape[-1]], None


def _refusal(
    module: nn.Module, mask: Tensor | None, query: Tensor, value: Tensor, options: Mapping[str, object]
) -> str:
    """Why `attend` cannot compute what is asked; empty if it can."""
    asked = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if asked:
        return f"its attention has {asked[0]}"
    if mask is not None or not getattr(module, "is_causal", True):
        return "its attention has a mask of its own"
    if len(query) != 1 or value.shape[-1] > query.shape[-1] or query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"its heads have {query.shape[-1]} dimensions"
    return ""


def varlen_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    *_: object,
    scale: float | None,
    window_size: tuple[int, int],
    **__: object,
) -> Tensor:
    """What `varlen_attn` computes, for tests: that has no kernel on the CPU."""
    outputs: list[Tensor] = []
    for start, stop in itertools.pairwise(ends.tolist()):
        queries, keys, values = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        allowed = allowed_keys(stop - start, window_size, q.device)
        out = F.scaled_dot_product_attention(queries, keys, values, allowed, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)
