"""The one place that chooses the attention kernel, which keeps the documents of a packed row apart.

On a GPU torchtitan's own kernels are used: `varlen` for plain documents in bfloat16, and `flex` for documents that
share a prefix and in float32, neither of which `varlen` supports. Neither has a backward pass on the CPU. There
`DocumentAttention` computes each document by the way that `trainer.engines.pytorch.document_attention` chooses.

At the end are rotary embeddings and the order of attention's parts, where families differ in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import (
    FlexAttention,
    GQAttention,
    VarlenAttention,
    VarlenMetadata,
    create_attention_mask,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from rl.data.packing import Document
from rl.system.decoders import Llama3RopeScaling
from trainer.engines.pytorch.context_parallel import ContextMasks, RowShard, attend_in_context, context_masks
from trainer.engines.pytorch.document_attention import RowPart, document_attention, plan_row, segment_mask
from trainer.engines.pytorch.hf_directory import scale_llama3
from trainer.engines.titan._compat import compile_attention_untuned

_FLEX_DIMS = 16  # the fewest of a head that `flex` has a kernel for


class DocumentAttention(FlexAttention):
    """Causal attention within each document of one packed row. It is a `FlexAttention` to torchtitan's checks."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Adds no options."""

    @torch.compiler.disable  # its calls differ from row to row
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its type
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan passes and shards these by name
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: ContextMasks | Sequence[RowPart],
        scale: float | None = None,
        **_: object,
    ) -> Tensor:
        """[1, L, heads, head_dim] each; `attention_masks` is the row's plan, see `document_attention`.

        Under context parallelism the queries are of a shard of the row, and `attention_masks` its `ContextMasks`.
        """
        if isinstance(attention_masks, ContextMasks):
            return attend_in_context(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale=scale)
        return document_attention(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale=scale)


class SegmentAttention(FlexAttention):
    """A row's attention on a GPU, by the kernel that its masks are for: `varlen` or `flex`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """Adds no options."""

    def __init__(self, config: Config) -> None:
        """Chooses the FlashAttention of this GPU."""
        super().__init__(config)
        self.varlen = VarlenAttention(VarlenAttention.Config())

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - flex alone takes a BlockMask
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan passes and shards these by name
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask | VarlenMetadata,
        **options: Any,
    ) -> Tensor:
        """[1, L, heads, head_dim] each; `attention_masks` is what the function of this name returns."""
        dims = v_BLNH.shape[-1]
        if isinstance(attention_masks, BlockMask):
            options["scale"] = options.get("scale") or q_BLNH.shape[-1] ** -0.5  # of the heads without padding
            q, k, v = (_widened(x, _FLEX_DIMS) for x in (q_BLNH, k_BLNH, v_BLNH))
            return super().forward(q, k, v, attention_masks=attention_masks, **options)[..., :dims]
        v = _widened(v_BLNH, q_BLNH.shape[-1])  # the kernel takes values as wide as keys
        return self.varlen.forward(q_BLNH, k_BLNH, v, attention_masks=attention_masks, **options)[..., :dims]


def _widened(heads: Tensor, dims: int) -> Tensor:
    """[..., D] -> [..., max(D, dims)], with zeros. A tensor that is wide enough is not copied, as `pad` would do."""
    missing = dims - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing > 0 else heads


def choose_inner_attention(device: torch.device) -> Module.Config:
    """The attention of a device."""
    if device.type == "cpu":
        return DocumentAttention.Config()
    compile_attention_untuned()
    return SegmentAttention.Config()


def needs_flex(documents: Sequence[Document], compute_dtype: torch.dtype) -> bool:
    """Whether `flex` computes a row on a GPU, and not `varlen`."""
    return compute_dtype != torch.bfloat16 or any(document.suffixes or document.opening for document in documents)


def attention_masks(positions: Tensor, documents: Sequence[Document], compute_dtype: torch.dtype) -> Any:
    """What the chosen kernel needs to know about a packed row with positions [1, L]."""
    return plan_row(documents) if positions.device.type == "cpu" else gpu_masks(positions, documents, compute_dtype)


def gpu_masks(positions: Tensor, documents: Sequence[Document], dtype: torch.dtype) -> BlockMask | VarlenMetadata:
    """The masks of `SegmentAttention`."""
    if not needs_flex(documents, dtype):
        return create_varlen_metadata_for_document(positions)
    length, device = positions.shape[1], positions.device
    return create_attention_mask(segment_mask(documents, device), 1, None, length, length, device=device)


def sharded_attention_masks(
    model: Decoder, positions: Tensor, documents: Sequence[Document], shard: RowShard, mesh: DeviceMesh
) -> Any:
    """As `attention_masks`, for this rank's shard of the row. `mesh` has the ranks of the context-parallel group."""
    if positions.device.type == "cpu":
        return context_masks(documents, shard)
    _, masks = cp_shard(mesh, (positions,), model.get_attention_masks(positions), load_balancer_type="headtail")
    return masks


class HFRoPE(CosSinRoPE):
    """Rotary embeddings as transformers computes them, including Llama 3's scaling, which `CosSinRoPE` refuses."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """`scaling="llama"` is the `llama3` type of transformers."""

    def _precompute_cache(self) -> torch.Tensor:
        """[max_seq_len, 2 * dim] cosines, then sines."""
        config = self.config
        empty = torch.empty(config.max_seq_len, 2 * config.dim)
        if empty.is_meta:  # the values follow when the model is on its device; arithmetic here would import sympy
            return empty
        angles = torch.outer(torch.arange(config.max_seq_len).float(), self.inverse_frequencies())
        angles = self.for_pairs(angles)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    def for_pairs(self, angles: Tensor) -> Tensor:
        """[max_seq_len, dim / 2] angles -> [max_seq_len, dim], of the dimensions that are rotated together."""
        return torch.cat([angles, angles], dim=-1)

    def inverse_frequencies(self) -> Tensor:
        """[dim / 2] angles per position, the fastest first."""
        config = self.config
        inv_freq = 1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)
        if config.scaling != "llama":
            return inv_freq
        scaling = Llama3RopeScaling(
            factor=config.scaling_factor,
            low_freq_factor=config.low_freq_factor,
            high_freq_factor=config.high_freq_factor,
            original_max_position_embeddings=config.original_max_position_embeddings,
        )
        return scale_llama3(inv_freq, scaling)


class NeighbourRoPE(HFRoPE):
    """Rotary embeddings of neighbouring dimensions, as Ernie 4.5 has them."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFRoPE.Config):
        """Same fields as `HFRoPE.Config`."""

    def for_pairs(self, angles: Tensor) -> Tensor:
        """As `HFRoPE.for_pairs`."""
        return angles.repeat_interleave(2, dim=-1)

    @staticmethod
    def apply_rotary_emb(query: Tensor, key: Tensor, rope_cache: Tensor) -> tuple[Tensor, Tensor]:
        """[1, L, heads, head_dim] each, and the cache [1, L, 1, 2 * head_dim] -> both rotated."""
        cos, sin = rope_cache[..., : query.shape[-1]], rope_cache[..., query.shape[-1] :]

        def rotated(x: Tensor) -> Tensor:
            turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
            return (x.float() * cos + turned.float() * sin).type_as(x)

        return rotated(query), rotated(key)


class NormsRotated(GQAttention):
    """Attention that rotates queries and keys before it normalises them."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """Same fields as `GQAttention.Config`."""

    def forward(self, x_BLD: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:  # noqa: N803
        """[1, L, D] -> [1, L, D]"""
        q, k, v = self.qkv_linear(x_BLD)
        q, k = self.rope(q, k, positions)
        assert self.q_norm is not None
        assert self.k_norm is not None
        options: dict[str, Any] = {"attention_masks": attention_masks, "scale": self.scaling}
        out = self.inner_attention(self.q_norm(q), self.k_norm(k), v, enable_gqa=self.enable_gqa, **options)
        return self.wo(out.contiguous().flatten(2))
