"""What a decoder's layers hold and keep: the shapes of their tensors, and their activations and caches, counted.

Nothing here imports torch. Families of models derive their shapes from `SizedDecoder`, and say where they differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from rl.system.decoders import DecoderConfig


@dataclass(frozen=True, slots=True)
class TensorSize:
    """Tensors of one shape, in each layer or once in the model."""

    shape: tuple[int, ...]
    kind: Literal["matrix", "whole", "vector", "expert"]
    """`whole` is a matrix that tensor parallelism does not cut."""
    count: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return self.count * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDecoder(DecoderConfig):
    """The shape of a decoder, with what its layers hold and keep.

    A layer is of kind 0 or 1, where a family has two kinds; dense decoders have kind 1 alone.
    """

    @property
    def queries(self) -> int:
        """Dimensions of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Dimensions of the keys of all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Dimensions of all values that attention adds up."""
        return self.queries

    @property
    def latent(self) -> int:
        """What is cached of a token in place of keys and values, whole on each rank; 0 for keys and values."""
        return 0

    @property
    def absorbed(self) -> TensorSize | None:
        """The matrix of attention that no adapter changes, since generators absorb it into others."""
        return None

    @property
    def state(self) -> tuple[int, int, str]:
        """What layers without attention keep of a sequence while it is generated, whatever its length.

        Elements of states, elements of their inputs, and the states' dtype, empty for the generator's.
        """
        return 0, 0, ""

    @property
    def rule_products(self) -> int:
        """Multiplications of a token in layers without attention, beside those with their matrices."""
        return 0

    @property
    def num_attending(self) -> int:
        """Layers with attention."""
        return self.num_layers

    def cached_layers(self, max_model_len: int) -> float:
        """Layers that cache keys and values of all of a sequence's tokens. One with a window counts in part."""
        del max_model_len
        return self.num_attending

    @property
    def network_dim(self) -> int:
        """Hidden dimensions of a feed-forward network that a token goes through, of all its experts together."""
        return self.hidden_dim

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer."""
        return (1,) * self.num_layers

    def attention(self, kind: int) -> Iterator[TensorSize]:
        """The tensors of attention in a layer of this kind, or of what it has in place of that, and of its norms."""
        del kind
        yield TensorSize((self.dim,), "vector", 2)
        yield from self.projections(self.queries)
        if self.row.qk_norm != "none":
            yield TensorSize((self.head_dim,), "vector", 2)
        if self.row.qkv_bias:
            yield from self.biases()

    def projections(self, queries: int) -> Iterator[TensorSize]:
        """The four matrices of grouped-query attention, whose first one makes `queries`, perhaps with gates."""
        yield TensorSize((queries, self.dim), "matrix")
        yield TensorSize((self.keys, self.dim), "matrix", 2)
        yield TensorSize((self.dim, self.queries), "matrix")

    def biases(self) -> Iterator[TensorSize]:
        """Of queries, keys and values."""
        yield TensorSize((self.queries,), "vector")
        yield TensorSize((self.keys,), "vector", 2)

    def network(self, kind: int) -> Iterator[TensorSize]:
        """The tensors of the feed-forward network in a layer of this kind, or of its experts."""
        del kind
        return self.feed_forward(self.hidden_dim)

    def feed_forward(self, hidden_dim: int) -> Iterator[TensorSize]:
        """The three matrices of a feed-forward network."""
        yield TensorSize((hidden_dim, self.dim), "matrix", 2)
        yield TensorSize((self.dim, hidden_dim), "matrix")

    def kept(self, kind: int) -> int:
        """Elements that a layer of this kind, without its norms, keeps of a token for the backward pass.

        They are of the compute dtype; an element in float32 counts as two.
        """
        del kind
        return 3 * self.queries + 4 * self.keys + 4 * self.network_dim

    def kept_products(self, kind: int) -> int:
        """Elements of `kept` before the feed-forward network that torchtitan's selective checkpointing keeps."""
        del kind
        return 2 * self.queries + self.keys


def sized(decoder: DecoderConfig) -> SizedDecoder:
    """The decoder with its sizes, which are a dense one's unless its family says otherwise."""
    if isinstance(decoder, SizedDecoder):
        return decoder
    return SizedDecoder(**{each.name: getattr(decoder, each.name) for each in fields(DecoderConfig)})
