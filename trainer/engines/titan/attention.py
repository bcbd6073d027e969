"""The one place that chooses how packed documents attend to themselves and not to each other.

On a GPU torchtitan's own kernels do it: `varlen` in bfloat16, `flex` in float32, which `varlen` lacks. Neither has a
backward pass on the CPU, where `DocumentAttention` runs one causal `scaled_dot_product_attention` per document.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torchtitan.models.common.attention import AttentionMasksType, FlexAttention
from torchtitan.models.common.config_utils import get_attention_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

# Mean tokens per document below which the CPU kernel is faster in float32 than in bfloat16: twice at 90 tokens.
_SHORT_DOCUMENT = 256


class DocumentLengths(NamedTuple):
    """Tokens of each document of a packed row, in order; they add up to the row."""

    lengths: tuple[int, ...]


class DocumentAttention(FlexAttention):
    """Causal attention within each document of one packed row. It is a `FlexAttention` to torchtitan's checks."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Nothing to configure."""

    def forward(
        self,
        q_BLNH: torch.Tensor,  # noqa: N803 - torchtitan passes and shards these by name
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """[1, L, heads, head_dim] each; `attention_masks` is the row's `DocumentLengths`."""
        assert isinstance(attention_masks, DocumentLengths)
        lengths = attention_masks.lengths
        dtype = torch.float32 if sum(lengths) < _SHORT_DOCUMENT * len(lengths) else q_BLNH.dtype
        documents = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            for q, k, v in zip(
                *(x.to(dtype).transpose(1, 2).split(lengths, dim=2) for x in (q_BLNH, k_BLNH, v_BLNH)), strict=True
            )
        ]
        return torch.cat(documents, dim=2).transpose(1, 2).to(q_BLNH.dtype)


def choose_inner_attention(device: torch.device, compute_dtype: torch.dtype) -> Module.Config:
    """The attention kernel for a device and dtype."""
    if device.type == "cpu":
        return DocumentAttention.Config()
    return get_attention_config("varlen" if compute_dtype == torch.bfloat16 else "flex")


def attention_masks(model: Decoder, positions: torch.Tensor, lengths: tuple[int, ...]) -> Any:
    """What the chosen kernel needs to know of a packed row; positions [1, L] restart at 0 with every document."""
    if positions.device.type == "cpu":
        return DocumentLengths(lengths)
    masks: AttentionMasksType | None = model.get_attention_masks(positions)
    return masks
