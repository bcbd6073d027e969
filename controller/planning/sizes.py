"""Parameters of one rank: the shapes of a decoder's tensors, and how a layout cuts each of them.

Decoders are of the Llama and Qwen families, gpt-oss, GLM-4.5, DeepSeek-V3 or Kimi K2.

Legend: D model dimension, Q and K dimensions of all queries and of all keys, F of the feed-forward network, E experts,
V words.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from trainer.config import TrainerConfig
from trainer.engines.decoder_config import DecoderConfig
from trainer.families.decoders import DeepseekShape, Glm4MoeShape, GptOssShape, RoutedShape

Kind = Literal["matrix", "whole", "vector", "expert"]
"""`whole` is a matrix that tensor parallelism does not cut."""


@dataclass(frozen=True, slots=True)
class TensorSize:
    """Tensors of one shape, in each layer or once in the model."""

    shape: tuple[int, ...]
    kind: Kind
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)

    def of_rank(self, config: TrainerConfig) -> int:
        """Elements that one rank holds of them. FSDP cuts dimension 0, so a rank may hold a row more than others."""
        shards = config.data_parallel_shard * config.context_parallel
        if self.kind == "expert":
            per_rank = -(-self.shape[0] // config.expert_parallel)
            of_experts = max(1, shards * config.tensor_parallel // config.expert_parallel)
            return self.count * -(-per_rank * math.prod(self.shape[1:]) // of_experts)
        rows = -(-self.shape[0] // config.tensor_parallel) if self.kind == "matrix" else self.shape[0]
        return self.count * -(-rows // shards) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class ModelSize:
    """A decoder's tensors."""

    decoder: DecoderConfig

    @property
    def queries(self) -> int:
        """Q."""
        return self.decoder.num_heads * self.decoder.head_dim

    @property
    def keys(self) -> int:
        """K."""
        return self.decoder.num_kv_heads * self.decoder.head_dim

    @property
    def values(self) -> int:
        """Dimensions of all values that attention adds up: Q but for latent attention."""
        decoder = self.decoder
        return decoder.num_heads * decoder.value_dim if isinstance(decoder, DeepseekShape) else self.queries

    @property
    def kept(self) -> int:
        """Elements that attention and the feed-forward network of a layer keep of a token for the backward pass."""
        decoder, q, k, f = self.decoder, self.queries, self.keys, self.feed_forward
        if isinstance(decoder, DeepseekShape):
            expanded = decoder.num_heads * (decoder.nope_dim + decoder.value_dim)
            return 3 * (decoder.q_rank + self.latent) + 2 * q + expanded + self.values + 4 * f
        return 3 * q + 4 * k + (6 if isinstance(decoder, GptOssShape) else 4) * f  # gpt-oss clamps gate and up

    @property
    def feed_forward(self) -> int:
        """F of one token: that of all experts that it goes to, shared ones among them."""
        decoder, moe = self.decoder, self.decoder.moe
        shared = decoder.routing.num_shared_experts if isinstance(decoder, RoutedShape) else 0
        return decoder.hidden_dim if moe is None else (moe.experts_per_token + shared) * moe.hidden_dim

    @cached_property
    def layer(self) -> tuple[TensorSize, ...]:
        """Tensors of one layer, which has experts if any has."""
        return (*self._attention(), *(self._feed_forward() if self.decoder.moe is None else self._experts()))

    @property
    def num_dense(self) -> int:
        """How many layers, the first ones, have a feed-forward network where the others have experts."""
        return self.decoder.routing.first_layer if isinstance(self.decoder, RoutedShape) else 0

    @cached_property
    def layers(self) -> tuple[tuple[int, tuple[TensorSize, ...]], ...]:
        """Layers of each kind: how many there are, and the tensors of one."""
        dense = (self.num_dense, (*self._attention(), *self._feed_forward()))
        return (dense, (self.decoder.num_layers - self.num_dense, self.layer))

    @property
    def active(self) -> float:
        """Elements of the layers' matrices that one token is multiplied with."""
        moe = self.decoder.moe
        share = {"expert": 0.0 if moe is None else moe.experts_per_token / moe.num_experts, "vector": 0.0}
        return sum(count * share.get(each.kind, 1.0) * each.numel for count, layer in self.layers for each in layer)

    def cached_layers(self, max_model_len: int) -> float:
        """Layers that keep keys and values of all of a sequence's tokens. One with a window counts in part."""
        windows = self.decoder.windows if isinstance(self.decoder, GptOssShape) else (None,) * self.decoder.num_layers
        return sum(1.0 if window is None else min(1.0, window / max_model_len) for window in windows)

    @property
    def latent(self) -> int:
        """What latent attention keeps of a token in place of keys and values, whole on each rank; 0 for others."""
        decoder = self.decoder
        return decoder.kv_rank + decoder.rope_dim if isinstance(decoder, DeepseekShape) else 0

    @cached_property
    def embedding(self) -> TensorSize:
        """[V, D]."""
        return TensorSize((self.decoder.vocab_size, self.decoder.dim), "matrix")

    @property
    def num_embeddings(self) -> int:
        """The embedding, and the output projection unless they are one."""
        return 1 if self.decoder.tie_embeddings else 2

    @property
    def numel(self) -> int:
        """Parameters of the model."""
        layers = sum(count * each.numel for count, layer in self.layers for each in layer)
        return layers + self.num_embeddings * self.embedding.numel + self.decoder.dim

    def of_rank(self, config: TrainerConfig) -> int:
        """Parameters of the rank that holds most: the last stage of a pipeline has the output projection."""
        per_stage = -(-self.decoder.num_layers // config.pipeline_parallel)
        dense = self.num_dense if config.pipeline_parallel == 1 else 0
        counts = (dense, per_stage - dense)
        embeddings = self.num_embeddings if config.pipeline_parallel == 1 else 1
        kinds = zip(counts, self.layers, strict=True)
        of_layers = sum(count * sum(each.of_rank(config) for each in layer) for count, (_, layer) in kinds)
        norm = TensorSize((self.decoder.dim,), "vector").of_rank(config)
        return of_layers + embeddings * self.embedding.of_rank(config) + norm

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA over all matrices of the layers, as every rank holds it."""
        pairs = [(count, each) for count, layer in self.layers for each in layer if each.kind in ("matrix", "whole")]
        return sum(count * each.count * rank * sum(each.shape) for count, each in pairs)

    def _attention(self) -> Iterator[TensorSize]:
        """Attention, and the norms of a layer."""
        d, decoder = self.decoder.dim, self.decoder
        yield TensorSize((d,), "vector", 2)
        if isinstance(decoder, DeepseekShape):
            yield from self._latent_attention(decoder)
            return
        yield TensorSize((self.queries, d), "matrix")
        yield TensorSize((self.keys, d), "matrix", 2)
        yield TensorSize((d, self.queries), "matrix")
        if decoder.family.startswith("qwen3") or (isinstance(decoder, Glm4MoeShape) and decoder.qk_norm):
            yield TensorSize((decoder.head_dim,), "vector", 2)
        has_bias = decoder.family in ("qwen2", "gpt_oss") or (
            isinstance(decoder, Glm4MoeShape) and decoder.attention_bias
        )
        if has_bias:
            yield TensorSize((self.queries,), "vector")
            yield TensorSize((self.keys,), "vector", 2)
        if isinstance(decoder, GptOssShape):
            yield TensorSize((d,), "vector")
            yield TensorSize((decoder.num_heads,), "vector")  # sinks

    def _latent_attention(self, decoder: DeepseekShape) -> Iterator[TensorSize]:
        """Of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.1)."""
        d, heads = decoder.dim, decoder.num_heads
        if decoder.q_rank:
            yield TensorSize((decoder.q_rank, d), "whole")
            yield TensorSize((decoder.q_rank,), "vector")
        yield TensorSize((self.queries, decoder.q_rank or d), "matrix")
        yield TensorSize((self.latent, d), "whole")
        yield TensorSize((decoder.kv_rank,), "vector")
        yield TensorSize((heads * (decoder.nope_dim + decoder.value_dim), decoder.kv_rank), "matrix")
        yield TensorSize((d, self.values), "matrix")

    def _feed_forward(self) -> Iterator[TensorSize]:
        yield TensorSize((self.decoder.hidden_dim, self.decoder.dim), "matrix", 2)
        yield TensorSize((self.decoder.dim, self.decoder.hidden_dim), "matrix")

    def _experts(self) -> Iterator[TensorSize]:
        d, decoder, moe = self.decoder.dim, self.decoder, self.decoder.moe
        assert moe is not None
        yield TensorSize((moe.num_experts, d), "whole")
        yield TensorSize((moe.num_experts, moe.hidden_dim, d), "expert", 2)
        yield TensorSize((moe.num_experts, d, moe.hidden_dim), "expert")
        if isinstance(decoder, GptOssShape):  # biases, of the router too
            yield TensorSize((moe.num_experts,), "vector")
            yield TensorSize((moe.num_experts, 2 * moe.hidden_dim), "expert")
            yield TensorSize((moe.num_experts, d), "expert")
        if isinstance(decoder, RoutedShape) and decoder.routing.num_shared_experts:
            shared = decoder.routing.num_shared_experts * moe.hidden_dim
            yield TensorSize((shared, d), "matrix", 2)
            yield TensorSize((d, shared), "matrix")
