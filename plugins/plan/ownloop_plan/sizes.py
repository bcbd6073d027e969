"""Parameters of one rank: the shapes of a decoder's tensors, and how a layout cuts each of them.

Decoders are of the Llama and Qwen families, gpt-oss, GLM-4.5, DeepSeek-V3 or Kimi K2.

Legend: D model dimension, Q and K dimensions of all queries and of all keys, F of the feed-forward network, E experts,
V tokens. A layer is of kind 0 or 1: in Qwen3.5, with a delta rule or with attention; in others, with a feed-forward
network where the rest have experts, or like the rest.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ownloop_families.decoders import DeepseekShape, Glm4MoeShape, GptOssShape, Qwen35Shape, RoutedShape
from rl.lora import LoRAConfig
from trainer.config import TrainerConfig
from trainer.engines.decoder_config import DecoderConfig

_CHUNK = 64  # `ownloop_families.gated_delta`, and fla's
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


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of a pipeline has of a model, or a rank without a pipeline."""

    kinds: tuple[int, ...]
    """The kind of each layer."""
    rows: int
    """Rows whose activations it keeps at the same time."""
    embeds: bool = True
    """Whether it has the embedding."""
    projects: bool = True
    """Whether it has the output projection."""


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

    def kept(self, kind: int) -> int:
        """Elements that attention or a delta rule and the feed-forward network keep of a token for the backward pass.

        They are elements of the compute dtype, of a layer of this kind; one in float32 counts as two.
        """
        decoder, q, k, f = self.decoder, self.queries, self.keys, self.feed_forward
        if isinstance(decoder, DeepseekShape):
            expanded = decoder.num_heads * (decoder.nope_dim + decoder.value_dim)
            return 3 * (decoder.q_rank + self.latent) + 2 * q + expanded + self.values + 4 * f
        if isinstance(decoder, Qwen35Shape):
            norms = 2 * decoder.dim  # computed in float32, they keep an input of twice the bytes
            return norms + 4 * f + (6 * q + 4 * k if kind else _kept_of_rule(decoder))
        return 3 * q + 4 * k + (6 if isinstance(decoder, GptOssShape) else 4) * f  # gpt-oss clamps gate and up

    def kept_products(self, kind: int) -> int:
        """Elements of `kept` before the feed-forward network that torchtitan's selective checkpointing keeps."""
        decoder, q, k = self.decoder, self.queries, self.keys
        if isinstance(decoder, Qwen35Shape):
            return 3 * q + k if kind else decoder.channels + decoder.num_value_heads
        return 2 * q + k

    @property
    def feed_forward(self) -> int:
        """F of one token: that of all experts that it goes to, shared ones among them."""
        moe = self.decoder.moe
        return self.decoder.hidden_dim if moe is None else moe.experts_per_token * moe.hidden_dim + self.shared

    @property
    def shared(self) -> int:
        """Hidden dimension of the experts that every token goes to, together."""
        decoder = self.decoder
        if isinstance(decoder, RoutedShape) and decoder.moe is not None:
            return decoder.routing.num_shared_experts * decoder.moe.hidden_dim
        return decoder.shared_hidden_dim if isinstance(decoder, Qwen35Shape) else 0

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each layer."""
        decoder = self.decoder
        if isinstance(decoder, Qwen35Shape):
            return tuple(int(attends) for attends in decoder.attends)
        first = decoder.routing.first_layer if isinstance(decoder, RoutedShape) else 0
        return tuple(int(layer >= first) for layer in range(decoder.num_layers))

    @cached_property
    def layers(self) -> tuple[tuple[int, tuple[TensorSize, ...]], ...]:
        """Layers of each kind: how many there are, and the tensors of one."""
        decoder = self.decoder
        last = tuple(self._feed_forward() if decoder.moe is None else self._experts())
        first = (
            (*self._delta_rule(decoder), *last)
            if isinstance(decoder, Qwen35Shape)
            else (*self._attention(), *self._feed_forward())
        )
        return (self.kinds.count(0), first), (self.kinds.count(1), (*self._attention(), *last))

    @property
    def active(self) -> float:
        """Elements of the layers' matrices that one token is multiplied with."""
        moe = self.decoder.moe
        share = {"expert": 0.0 if moe is None else moe.experts_per_token / moe.num_experts, "vector": 0.0}
        return sum(count * share.get(each.kind, 1.0) * each.numel for count, layer in self.layers for each in layer)

    def cached_layers(self, max_model_len: int) -> float:
        """Layers that keep keys and values of all of a sequence's tokens. One with a window counts in part."""
        if isinstance(self.decoder, GptOssShape):
            windows = self.decoder.windows
            return sum(1.0 if window is None else min(1.0, window / max_model_len) for window in windows)
        return self.num_attending

    @property
    def rule_products(self) -> int:
        """Multiplications of a token by delta rules, in chunks of C tokens: 2 C (K + V) + 3 K V for each head.

        Of keys with keys and queries, and with new values; of the state, read twice and written once.
        """
        decoder = self.decoder
        if not isinstance(decoder, Qwen35Shape):
            return 0
        k, v = decoder.key_head_dim, decoder.value_head_dim
        return self.kinds.count(0) * decoder.num_value_heads * (2 * _CHUNK * (k + v) + 3 * k * v)

    @property
    def state(self) -> tuple[int, int]:
        """What delta rules keep of a sequence, in elements: their states, and the inputs of their convolutions."""
        decoder = self.decoder
        if not isinstance(decoder, Qwen35Shape):
            return 0, 0
        num_layers = self.kinds.count(0)
        inputs = (decoder.kernel_size - 1) * decoder.channels
        return num_layers * decoder.values * decoder.key_head_dim, num_layers * inputs

    @property
    def state_dtype(self) -> str:
        """The dtype of these states; empty for the generator's dtype."""
        return self.decoder.state_dtype if isinstance(self.decoder, Qwen35Shape) else ""

    @property
    def num_attending(self) -> int:
        """Layers with attention."""
        return self.kinds.count(1) if isinstance(self.decoder, Qwen35Shape) else self.decoder.num_layers

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

    def stages(self, config: TrainerConfig) -> tuple[Stage, ...]:
        """The different stages of a pipeline; of like ones, the one that keeps most rows.

        torchtitan divides the layers evenly, with the embedding and the output projection as a layer each.
        """
        ranks, count = config.pipeline_parallel, config.num_stages
        if ranks == 1:
            return (Stage(self.kinds, rows=1),)
        least, more = divmod(self.decoder.num_layers + 2, count)
        sizes = [least + (index < more) - (index in (0, count - 1)) for index in range(count)]
        ends = list(itertools.accumulate(sizes))
        found: dict[tuple[tuple[int, ...], bool, bool], Stage] = {}
        for rank in range(ranks):
            own = range(rank, count, ranks)
            kinds = tuple(kind for index in own for kind in self.kinds[ends[index] - sizes[index] : ends[index]])
            # Rows that have gone forward and not back, in 1F1B or in torch's ScheduleInterleaved1F1B.
            rows = ranks - rank if len(own) == 1 else -(-(ranks + 2 * (ranks - rank) - 1) // 2)
            stage = Stage(kinds, rows, embeds=rank == 0, projects=rank == ranks - 1)
            found.setdefault((kinds, stage.embeds, stage.projects), stage)
        return tuple(found.values())

    def of_rank(self, config: TrainerConfig) -> int:
        """Parameters of the rank that holds most."""
        return max(self.of_stage(config, stage) for stage in self.stages(config))

    def of_stage(self, config: TrainerConfig, stage: Stage) -> int:
        """Parameters of a rank of a stage."""
        sizes = [sum(each.of_rank(config) for each in layer) for _, layer in self.layers]
        of_layers = sum(stage.kinds.count(kind) * sizes[kind] for kind in (0, 1))
        embeddings = self.num_embeddings if stage.embeds and stage.projects else stage.embeds + stage.projects
        norm = TensorSize((self.decoder.dim,), "vector").of_rank(config) if stage.projects else 0
        return of_layers + embeddings * self.embedding.of_rank(config) + norm

    def adapter(self, lora: LoRAConfig, stage: Stage | None = None) -> int:
        """Parameters of an adapter over the model, or over a stage, as every rank holds it."""
        kinds = self.kinds if stage is None else stage.kinds
        sizes = [sum(each.count * sum(each.shape) for each in self._adapted(lora, kind)) for kind in (0, 1)]
        head = sum(self.embedding.shape) if lora.train_unembed and (stage is None or stage.projects) else 0
        return lora.rank * (sum(kinds.count(kind) * sizes[kind] for kind in (0, 1)) + head)

    def _adapted(self, lora: LoRAConfig, kind: int) -> Iterator[TensorSize]:
        """Projections of a layer that are adapted: of a mixture, attention's alone."""
        decoder = self.decoder
        if lora.train_attn:
            has_rules = isinstance(decoder, Qwen35Shape)
            layer = self._delta_rule(decoder) if has_rules and not kind else self._attention()
            # Generators absorb the projection from latents to keys and values, so nothing adapts it.
            absorbed = isinstance(decoder, DeepseekShape) and self._keys_and_values(decoder)
            yield from (each for each in layer if each.kind in ("matrix", "whole") and each != absorbed)
        if lora.train_mlp and decoder.moe is None:
            yield from self._feed_forward()

    def _attention(self) -> Iterator[TensorSize]:
        """Attention, and the norms of a layer."""
        d, decoder = self.decoder.dim, self.decoder
        yield TensorSize((d,), "vector", 2)
        if isinstance(decoder, DeepseekShape):
            yield from self._latent_attention(decoder)
            return
        gates = self.queries if isinstance(decoder, Qwen35Shape) else 0
        yield TensorSize((self.queries + gates, d), "matrix")
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
        d = decoder.dim
        if decoder.q_rank:
            yield TensorSize((decoder.q_rank, d), "whole")
            yield TensorSize((decoder.q_rank,), "vector")
        yield TensorSize((self.queries, decoder.q_rank or d), "matrix")
        yield TensorSize((self.latent, d), "whole")
        yield TensorSize((decoder.kv_rank,), "vector")
        yield self._keys_and_values(decoder)
        yield TensorSize((d, self.values), "matrix")

    def _keys_and_values(self, decoder: DeepseekShape) -> TensorSize:
        """The projection from latents to keys and values."""
        return TensorSize((decoder.num_heads * (decoder.nope_dim + decoder.value_dim), decoder.kv_rank), "matrix")

    def _delta_rule(self, decoder: Qwen35Shape) -> Iterator[TensorSize]:
        """A delta rule with its projections and its convolution, and the norms of a layer."""
        d, heads, values = decoder.dim, decoder.num_value_heads, decoder.values
        yield TensorSize((d,), "vector", 2)
        yield TensorSize((decoder.channels, d), "matrix")
        yield TensorSize((values, d), "matrix")
        yield TensorSize((heads, d), "matrix", 2)
        yield TensorSize((decoder.channels, decoder.kernel_size), "vector")
        yield TensorSize((heads,), "vector", 2)
        yield TensorSize((decoder.value_head_dim,), "vector")
        yield TensorSize((d, values), "matrix")

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
        if self.shared:
            yield TensorSize((self.shared, d), "matrix", 2)
            yield TensorSize((d, self.shared), "matrix")
        if isinstance(decoder, Qwen35Shape):
            yield TensorSize((1, d), "whole")  # what the shared expert's output is multiplied by


def _kept_of_rule(decoder: Qwen35Shape) -> int:
    """Of a token by a layer with a delta rule, as fla's kernels compute it.

    Projections and the convolution over W tokens keep W + 1 times the channels. The kernels keep queries and keys of
    length 1, values, and a row of a chunk's matrix for each head. The gated norm keeps values and gates in float32.
    """
    queries_and_keys = decoder.channels - decoder.values
    of_heads = decoder.num_value_heads * (_CHUNK + 10)  # decays and betas, mostly in float32, are the ten
    return (decoder.kernel_size + 1) * decoder.channels + queries_and_keys + 10 * decoder.values + of_heads
