"""Parameters of one rank: the shapes of a decoder's tensors, and how a layout cuts each of them.

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

Kind = Literal["matrix", "vector", "expert"]


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
        rows = self.shape[0] if self.kind == "vector" else -(-self.shape[0] // config.tensor_parallel)
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
    def feed_forward(self) -> int:
        """F of one token: that of all experts that it goes to."""
        moe = self.decoder.moe
        return self.decoder.hidden_dim if moe is None else moe.experts_per_token * moe.hidden_dim

    @cached_property
    def layer(self) -> tuple[TensorSize, ...]:
        """Tensors of one layer."""
        return tuple(self._layer())

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
        layers = self.decoder.num_layers * sum(each.numel for each in self.layer)
        return layers + self.num_embeddings * self.embedding.numel + self.decoder.dim

    def of_rank(self, config: TrainerConfig) -> int:
        """Parameters of the rank that holds most: the last stage of a pipeline has the output projection."""
        layers = -(-self.decoder.num_layers // config.pipeline_parallel)
        embeddings = self.num_embeddings if config.pipeline_parallel == 1 else 1
        of_layers = layers * sum(each.of_rank(config) for each in self.layer)
        norm = TensorSize((self.decoder.dim,), "vector").of_rank(config)
        return of_layers + embeddings * self.embedding.of_rank(config) + norm

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA over all matrices of the layers, as every rank holds it."""
        pairs = [each for each in self.layer if each.kind == "matrix"]
        return self.decoder.num_layers * sum(each.count * rank * sum(each.shape) for each in pairs)

    def _layer(self) -> Iterator[TensorSize]:
        d, moe = self.decoder.dim, self.decoder.moe
        yield TensorSize((self.queries, d), "matrix")
        yield TensorSize((self.keys, d), "matrix", 2)
        yield TensorSize((d, self.queries), "matrix")
        yield TensorSize((d,), "vector", 2)
        if self.decoder.family.startswith("qwen3"):
            yield TensorSize((self.decoder.head_dim,), "vector", 2)
        if self.decoder.family == "qwen2":
            yield TensorSize((self.queries,), "vector")
            yield TensorSize((self.keys,), "vector", 2)
        if moe is None:
            yield TensorSize((self.decoder.hidden_dim, d), "matrix", 2)
            yield TensorSize((d, self.decoder.hidden_dim), "matrix")
        else:
            yield TensorSize((moe.num_experts, d), "matrix")
            yield TensorSize((moe.num_experts, moe.hidden_dim, d), "expert", 2)
            yield TensorSize((moe.num_experts, d, moe.hidden_dim), "expert")
