"""Has an image's tokens attend to each other in both directions on the CPU, as Gemma 3 wants: a patch of vLLM 0.32.

The family of Gemma 3 names it. Nothing is patched when this module is imported. vLLM's backends for GPUs do this by
themselves. The one for the CPU knows no such mask and computes another model, without an error. Here its output for an
image's tokens is computed again, in plain PyTorch, from the keys of the same step: so a prompt must be computed in one
step, without a prefix from the cache.

Legend: N tokens of the step, Q of an image, K of the image and of what is before it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

_build = CPUAttentionMetadataBuilder.build
_forward = CPUAttentionBackendImpl.forward


class _Image(NamedTuple):
    """Places in the step's tokens."""

    prompt: int
    """Where the prompt of the image begins."""
    first: int
    last: int


def patch_image_attention() -> None:
    """Applies the patch. Remove it when vLLM's backend for the CPU supports `mm_prefix`."""
    setattr(CPUAttentionMetadataBuilder, "build", _build_with_images)  # noqa: B010
    setattr(CPUAttentionBackendImpl, "forward", _forward_with_images)  # noqa: B010


def _build_with_images(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any) -> Any:
    made: Any = _build(self, common_prefix_len, common_attn_metadata, *args, **options)
    made.images = _images(common_attn_metadata) if common_attn_metadata.mm_req_doc_ranges else ()
    return made


def _images(metadata: Any) -> tuple[_Image, ...]:
    """The images whose tokens are computed in this step. Raises RuntimeError for a part of one."""
    begins, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    found: list[_Image] = []
    for request, ranges in metadata.mm_req_doc_ranges.items():
        begin = begins[request]
        cached = lengths[request] - (begins[request + 1] - begin)
        for first, last in ranges:
            if last < cached:
                continue
            if cached:
                raise RuntimeError("a prompt with an image is computed in parts; vLLM has to compute it in one step")
            found.append(_Image(begin, begin + first, begin + last))
    return tuple(found)


def _forward_with_images(
    self: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    *args: Any,
    **options: object,
) -> Tensor:
    """As vLLM's: query [N, heads, D], key and value [N, key-value heads, D], output of as many values as query."""
    out: Tensor = _forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **options)
    images: tuple[_Image, ...] = getattr(attn_metadata, "images", ())
    if self.attn_type == AttentionType.DECODER:
        for image in images:
            rows = out[image.first : image.last + 1]
            rows.copy_(_attention(self, query, key, value, image).reshape(rows.shape))
    return out


def _attention(backend: Any, query: Tensor, key: Tensor, value: Tensor, image: _Image) -> Tensor:
    """[Q, heads, D]: a window bounds what is before the image; the image is shorter than it."""
    end = image.last + 1
    q, k, v = query[image.first : end], key[image.prompt : end], value[image.prompt : end]
    asks = torch.arange(image.first, end)[:, None]
    reads = torch.arange(image.prompt, end)
    window = backend.sliding_window if backend.sliding_window > 0 else end  # -1 stands for none
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, asks - reads < window, scale=backend.scale, enable_gqa=True)
    return out.transpose(0, 1)
