"""torchtitan's dense decoders with layers that compute by the kernels. A layer has the parameters that it had before.

Attention computes each prefix and each suffix of a packed row as a sequence of its own, whose keys are what it sees in
the order of positions. So prompts stay shared, and a sequence's result is a generator's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_bitwise import autograd, ops
from ownloop_bitwise.operands import Rows, rope_table
from ownloop_bitwise.packed import Packs
from ownloop_bitwise.shape import BitwiseDecoder, inverse_frequencies
from rl.data.packing import Document
from rl.types import Head
from trainer.engines.pytorch.distribution import ChunkTokens, Distribution
from trainer.engines.pytorch.logprobs import logprobs_and_entropy
from trainer.engines.pytorch.low_rank import Adaptable
from trainer.engines.titan.model import specs
from trainer.engines.titan.model.attention import DocumentAttention, HFRoPE
from trainer.engines.titan.model.specs import DensePolicy, LogprobHead, norm_config


class BitwiseLinear(Packs, Adaptable, Linear):
    """A `Linear` that multiplies by the kernel, and can be adapted."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Same fields as `Linear.Config`."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[..., in] -> [..., out]"""
        y = autograd.linear(x, self.weight, self.bias, self.packed(self.weight))
        if self.low_rank is None:
            return y
        return y + autograd.BitwiseLowRank.of(self.low_rank, x.dtype).product(x)


class BitwiseNorm(RMSNorm):
    """An `RMSNorm` by the kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """`shift` is added to the weight: 1 in Gemma."""

        shift: float = 0.0

    def __init__(self, config: Config) -> None:
        """Notes the shift."""
        super().__init__(config)
        self._shift = config.shift

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        assert self.eps is not None
        return autograd.rms_norm(x, self.weight, self.eps, self._shift)


class BitwiseFeedForward(FeedForward):
    """A `FeedForward` whose activation is the kernel's."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """With `gelu`, the activation is a GELU."""

        gelu: bool = False

    def __init__(self, config: Config) -> None:
        """Notes the activation."""
        super().__init__(config)
        self._gelu = config.gelu

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(autograd.gate_mul(self.w1(x), self.w3(x), gelu=self._gelu))


class BitwiseRoPE(HFRoPE):
    """Rotary embeddings by the kernel, from the table that the generator has."""

    @dataclass(kw_only=True, slots=True)
    class Config(HFRoPE.Config):
        """`frequencies` are `inverse_frequencies` of the model; for `neighbours` see `ops.rotate`."""

        frequencies: tuple[float, ...] = ()
        neighbours: bool = False

    def forward(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[1, L, heads, D] each, at positions [1, L]."""
        assert positions is not None
        config: Any = self.config
        table = rope_table(config.frequencies, config.max_seq_len, query.device)
        where = positions.reshape(-1)
        pairs = {"neighbours": config.neighbours}
        return autograd.rotate(query, table, where, **pairs), autograd.rotate(key, table, where, **pairs)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a row's attention is computed."""

    sequences: ops.Sequences
    ordinary: object
    """The plan of the ordinary attention, which computes the backward pass."""


class BitwiseAttention(DocumentAttention):
    """Attention by the kernel, with the gradient of the ordinary one where there is neither a window nor a cap."""

    @dataclass(kw_only=True, slots=True)
    class Config(DocumentAttention.Config):
        """`window` and `cap` as in `ops.attend`; `scale` goes before the layer's own."""

        ordinary: Module.Config
        window: int = 0
        cap: float = 0.0
        scale: float | None = None

    def __init__(self, config: Config) -> None:
        """Notes the options."""
        super().__init__(config)
        self._window, self._cap, self._scale = config.window, config.cap, config.scale
        self.ordinary = config.ordinary.build()

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its type
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan passes these by name
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: RowPlan,
        scale: float | None = None,
        **options: object,
    ) -> Tensor:
        """[1, L, heads, head_dim] each; `attention_masks` is the row's plan."""
        plan, window, cap = attention_masks, self._window, self._cap
        factor = self._scale or scale or q_BLNH.shape[-1] ** -0.5

        def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if window or cap:
                return masked_attention(q, k, v, plan.sequences, factor, window, cap)
            return self.ordinary(q, k, v, attention_masks=plan.ordinary, scale=factor, **options)

        return autograd.attend(q_BLNH, k_BLNH, v_BLNH, plan.sequences, factor, window, cap, ordinary)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: ops.Sequences, scale: float, window: int, cap: float
) -> Tensor:
    """The same in PyTorch, in float32: each sequence alone, with a mask of its queries and keys."""
    out = torch.zeros_like(q)
    ends = zip(sequences.query_starts.tolist(), sequences.key_starts.tolist(), strict=True)
    for (first, first_key), (stop, stop_key) in pairwise(ends):
        rows, keys = sequences.query_rows[first:stop], sequences.key_rows[first_key:stop_key]
        seen, places = sequences.seen[first:stop, None], torch.arange(len(keys), device=q.device)
        mask = (places < seen) & (places >= seen - window) if window else places < seen
        queries = q[0, rows].float().unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("qgrd,kgd->grqk", queries, k[0, keys].float()) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("grqk,kgd->qgrd", weights, v[0, keys].float()).flatten(1, 2)
        out = out.index_copy(1, rows, attended[None].to(q.dtype))
    return out


def sequences_of(documents: Sequence[Document]) -> ops.Sequences:
    """A sequence for each prefix and each suffix of a row: its keys are what its last token sees, by position."""
    queries, seen, keys, start = list[Rows](), list[Rows](), list[Rows](), 0
    for document in documents:
        segments = document.segments()
        for first, stop, _ in segments:
            if stop == first:
                continue
            before = [np.arange(begin, end) + start for begin, end, until in segments if end <= first < until]
            own = np.arange(first, stop) + start
            keys.append(np.concatenate([np.arange(document.opening), *before, own]))
            queries.append(own)
            seen.append(len(keys[-1]) - len(own) + 1 + np.arange(len(own)))
        start += document.num_tokens
    return ops.Sequences.of(queries, seen, keys)


class BitwiseHead(Packs, LogprobHead):
    """A `LogprobHead` whose logits and their sums are the kernels'."""

    @dataclass(kw_only=True, slots=True)
    class Config(LogprobHead.Config):
        """With a `cap`, logits go through `ops.soft_cap`."""

        cap: float | None = None

    def __init__(self, config: Config) -> None:
        """Notes the cap."""
        super().__init__(config)
        self._cap = config.cap

    def forward(
        self, hidden: Tensor, targets: Tensor, *, entropy: bool, distribution: Distribution
    ) -> tuple[Tensor, Tensor | None]:
        """As `LogprobHead.forward`."""
        adapter, distribution = self.low_rank, replace(distribution, kernels=self)
        low_rank = None if adapter is None else autograd.BitwiseLowRank.of(adapter, hidden.dtype)
        return logprobs_and_entropy(
            *(hidden, self.weight, targets),
            entropy=entropy,
            low_rank=low_rank,
            distribution=distribution,
            cap=self._cap,
        )

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """Logits [C, V] of hidden states [C, D]; `weight` [V, D] is the layer's own, or some of its rows, or a B."""
        whole = self.keeps_packed and weight.shape == self.weight.shape and weight.data_ptr() == self.weight.data_ptr()
        return ops.product(hidden, self.packed(weight) if whole else ops.Packed.of(weight), out=out)

    def capped(self, logits: Tensor, cap: float) -> Tensor:
        """As `ops.soft_cap`, in the place of the logits."""
        return logits.copy_(ops.soft_cap(logits, cap))

    def softmax_sums(
        self, tokens: ChunkTokens | None, logits: Tensor, entropy: bool, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As the function of this name in `logprobs`. Of kept sets, each position's own are summed, by number."""
        if tokens is None:
            return ops.log_sum_exp_rows(logits, scale, mean=entropy)
        values = logits[tokens.positions, tokens.columns]
        ends = torch.bincount(tokens.positions, minlength=len(logits)).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        return ops.log_sum_exp(values, starts, ends, scale, mean=entropy)


class BitwisePolicy(DensePolicy):
    """A dense decoder that scores, bit by bit as a generator samples."""

    @dataclass(kw_only=True, slots=True)
    class Config(DensePolicy.Config):
        """Same fields as `DensePolicy.Config`."""

    def plan(self, positions: Tensor, documents: Sequence[Document], compute_dtype: torch.dtype) -> RowPlan:
        """As `Policy.plan`."""
        ordinary = super().plan(positions, documents, compute_dtype)
        return RowPlan(sequences_of(documents).to(positions.device), ordinary)


class ScaledEmbedding(Embedding):
    """Embeddings times a factor, which is rounded to their dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """`factor` is 1 where embeddings are not scaled."""

        factor: float = 1.0

    def __init__(self, config: Config) -> None:
        """Notes the factor."""
        super().__init__(config)
        self._factor = config.factor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torchtitan's name
        """[...] -> [..., D]"""
        x = super().forward(input)
        return x * torch.tensor(self._factor, dtype=x.dtype)


class GemmaBlock(Qwen3TransformerBlock):
    """A layer with norms before and after attention and the feed-forward network."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """The norms that follow."""

        after_attention: RMSNorm.Config
        after_ffn: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        """Builds it."""
        super().__init__(config)
        self.after_attention, self.after_ffn = config.after_attention.build(), config.after_ffn.build()

    def forward(self, x: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:
        """[1, L, D] -> [1, L, D]"""
        x = x + self.after_attention(self.attention(self.attention_norm(x), attention_masks, positions))
        return x + self.after_ffn(self.feed_forward(self.ffn_norm(x)))


_GEMMA_NAMES = {
    "after_attention": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "after_ffn": "post_feedforward_layernorm",
}


def build_spec(shape: BitwiseDecoder, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """As `specs.build_spec`, with the layers of this module."""
    spec = specs.build_spec(shape, head, inner_attention)
    model: Any = spec.model
    for layer, window in zip(model.layers, shape.windows or (0,) * shape.num_layers, strict=True):
        layer.attention.inner_attention = BitwiseAttention.Config(
            ordinary=inner_attention, window=window, cap=shape.attention_cap, scale=shape.attention_scale
        )
    more: dict[str, object] = {}
    if shape.is_gemma:
        norms = {name: norm_config(shape, shape.dim) for name in ("after_attention", "after_ffn")}
        model.layers = [_as(GemmaBlock.Config, layer, **norms) for layer in model.layers]
        model.tok_embeddings = _as(ScaledEmbedding.Config, model.tok_embeddings, factor=shape.dim**0.5)
        more["names"] = _GEMMA_NAMES
    _replace_layers(model, shape)
    spec.model = _as(BitwisePolicy.Config, model, **more)
    return spec


def _replace_layers(model: Any, shape: BitwiseDecoder) -> None:
    for number, layer in enumerate(model.layers):
        rope, neighbours = layer.attention.rope, shape.row.rotates == "neighbours"
        frequencies = inverse_frequencies(shape, number)
        layer.attention.rope = _as(BitwiseRoPE.Config, rope, frequencies=frequencies, neighbours=neighbours)
    for kind, by, more in (
        (FeedForward.Config, BitwiseFeedForward.Config, {"gelu": shape.is_gemma}),
        (Linear.Config, BitwiseLinear.Config, {}),
        (LogprobHead.Config, BitwiseHead.Config, {"cap": shape.logit_cap}),
        (RMSNorm.Config, BitwiseNorm.Config, {"shift": float(shape.is_gemma)}),
    ):
        for _, config, parent, name in list(model.traverse(kind)):
            if type(config) is kind:  # a value head stays as it is: no generator has one
                setattr(parent, name, _as(by, config, **more))


def _as(kind: Any, config: Any, **more: Any) -> Any:
    """A configuration as one of another class, with the same values but for `more`."""
    return kind(**{each.name: getattr(config, each.name) for each in fields(config) if each.init} | more)
