"""torchtitan's dense decoders with layers that compute by the kernels. A layer has the parameters that it had before.

Attention computes each prefix and each suffix of a packed row as a sequence of its own, whose keys are what it sees in
the order of positions. So prompts stay shared, and a sequence's result is a generator's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from ownloop_bitwise import autograd, ops
from ownloop_bitwise.packed import Packs
from ownloop_bitwise.shape import BitwiseDecoder, inverse_frequencies
from rl.data.packing import Document
from rl.types import Head
from trainer.engines.pytorch.distribution import ChunkTokens, Distribution
from trainer.engines.pytorch.document_attention import RowPart, document_attention
from trainer.engines.pytorch.logprobs import logprobs_and_entropy
from trainer.engines.pytorch.low_rank import Adaptable
from trainer.engines.titan.model import specs
from trainer.engines.titan.model.attention import DocumentAttention, HFRoPE, NeighbourRoPE
from trainer.engines.titan.model.specs import DensePolicy, LogprobHead


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
        """Same fields as `RMSNorm.Config`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        assert self.eps is not None
        return autograd.rms_norm(x, self.weight, self.eps)


class BitwiseFeedForward(FeedForward):
    """A `FeedForward` whose activation is the kernel's."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """Same fields as `FeedForward.Config`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return self.w2(autograd.silu_mul(self.w1(x), self.w3(x)))


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
        table, where = ops.rope_table(config.frequencies, config.max_seq_len), positions.reshape(-1)
        pairs = {"neighbours": config.neighbours}
        return autograd.rotate(query, table, where, **pairs), autograd.rotate(key, table, where, **pairs)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a row's attention is computed."""

    sequences: ops.Sequences
    ordinary: Sequence[RowPart]
    """The plan of the tiles, which compute the backward pass."""


class BitwiseAttention(DocumentAttention):
    """Attention by the kernel, with the gradient of `DocumentAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(DocumentAttention.Config):
        """Adds no options."""

    @torch.compiler.disable
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides its type
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan passes these by name
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: RowPlan,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, L, heads, head_dim] each; `attention_masks` is the row's plan."""
        plan, factor = attention_masks, q_BLNH.shape[-1] ** -0.5 if scale is None else scale

        def ordinary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return document_attention(q, k, v, plan.ordinary, scale=factor)

        return autograd.attend(q_BLNH, k_BLNH, v_BLNH, plan.sequences, factor, ordinary)


def sequences_of(documents: Sequence[Document]) -> ops.Sequences:
    """A sequence for each prefix and each suffix of a row: its keys are what its last token sees, by position."""
    queries, seen, keys, start = list[ops.Rows](), list[ops.Rows](), list[ops.Rows](), 0
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
        """Same fields as `LogprobHead.Config`."""

    def forward(
        self, hidden: Tensor, targets: Tensor, *, entropy: bool, distribution: Distribution
    ) -> tuple[Tensor, Tensor | None]:
        """As `LogprobHead.forward`."""
        adapter, distribution = self.low_rank, replace(distribution, kernels=self)
        low_rank = None if adapter is None else autograd.BitwiseLowRank.of(adapter, hidden.dtype)
        return logprobs_and_entropy(
            *(hidden, self.weight, targets), entropy=entropy, low_rank=low_rank, distribution=distribution
        )

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
        """Logits [C, V] of hidden states [C, D]; `weight` [V, D] is the layer's own, or some of its rows, or a B."""
        whole = self.keeps_packed and weight.shape == self.weight.shape and weight.data_ptr() == self.weight.data_ptr()
        return ops.product(hidden, self.packed(weight) if whole else ops.Packed.of(weight), out=out)

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
        return RowPlan(sequences_of(documents), super().plan(positions, documents, compute_dtype))


def build_spec(shape: BitwiseDecoder, head: Head, inner_attention: Module.Config) -> ModelSpec:
    """As `specs.build_spec`, with the layers of this module."""
    del inner_attention
    spec = specs.build_spec(shape, head, BitwiseAttention.Config())
    _replace_layers(spec.model, shape)
    spec.model = _as(BitwisePolicy.Config, spec.model)
    return spec


def _replace_layers(model: Any, shape: BitwiseDecoder) -> None:
    rope = {"frequencies": inverse_frequencies(shape)}
    for kind, by, more in (
        (FeedForward.Config, BitwiseFeedForward.Config, {}),
        (Linear.Config, BitwiseLinear.Config, {}),
        (LogprobHead.Config, BitwiseHead.Config, {}),
        (RMSNorm.Config, BitwiseNorm.Config, {}),
        (HFRoPE.Config, BitwiseRoPE.Config, rope),
        (NeighbourRoPE.Config, BitwiseRoPE.Config, {**rope, "neighbours": True}),
    ):
        for _, config, parent, name in list(model.traverse(kind)):
            if type(config) is kind:  # a value head stays as it is: no generator has one
                setattr(parent, name, _as(by, config, **more))


def _as(kind: Any, config: Any, **more: Any) -> Any:
    """A configuration as one of another class, with the same values."""
    return kind(**{each.name: getattr(config, each.name) for each in fields(config) if each.init}, **more)
