"""Parameters of one rank: the shapes of a decoder's tensors, and how a layout cuts each of them.

A decoder says itself which tensors its layers have: see `sized_decoder.py`, whose kinds of layers these are. Legend: D
model dimension, V tokens of the vocabulary.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ownloop_plan.sized_decoder import SizedDecoder, TensorSize, sized
from rl.lora import LoRAConfig
from rl.system.decoders import DecoderConfig
from trainer.config import TrainerConfig


def of_rank(tensor: TensorSize, config: TrainerConfig) -> int:
    """Elements that a rank holds of these tensors. FSDP cuts dimension 0, so it may hold a row more than others."""
    shards = config.data_parallel_shard * config.context_parallel
    first, others = tensor.shape[0], math.prod(tensor.shape[1:])
    if tensor.kind == "expert":
        of_experts = max(1, shards * config.tensor_parallel // config.expert_parallel)
        return tensor.count * -(-(-(-first // config.expert_parallel) * others) // of_experts)
    rows = -(-first // config.tensor_parallel) if tensor.kind == "matrix" else first
    return tensor.count * -(-rows // shards) * others


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

    shape: DecoderConfig

    @cached_property
    def decoder(self) -> SizedDecoder:
        """The shape, with the sizes of its layers."""
        return sized(self.shape)

    @cached_property
    def layers(self) -> tuple[tuple[int, tuple[TensorSize, ...]], ...]:
        """Layers of each kind: how many there are, and the tensors of one."""
        decoder = self.decoder
        return tuple((decoder.kinds.count(kind), (*decoder.attention(kind), *decoder.network(kind))) for kind in (0, 1))

    @property
    def active(self) -> float:
        """Elements of the layers' matrices that one token is multiplied with."""
        moe = self.decoder.moe
        share = {"expert": 0.0 if moe is None else moe.experts_per_token / moe.num_experts, "vector": 0.0}
        return sum(count * share.get(each.kind, 1.0) * each.numel for count, layer in self.layers for each in layer)

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
            return (Stage(self.decoder.kinds, rows=1),)
        least, more = divmod(self.decoder.num_layers + 2, count)
        sizes = [least + (index < more) - (index in (0, count - 1)) for index in range(count)]
        ends = list(itertools.accumulate(sizes))
        found: dict[tuple[tuple[int, ...], bool, bool], Stage] = {}
        for rank in range(ranks):
            own = range(rank, count, ranks)
            kinds = tuple(
                kind for index in own for kind in self.decoder.kinds[ends[index] - sizes[index] : ends[index]]
            )
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
        sizes = [sum(of_rank(each, config) for each in layer) for _, layer in self.layers]
        of_layers = sum(stage.kinds.count(kind) * sizes[kind] for kind in (0, 1))
        embeddings = self.num_embeddings if stage.embeds and stage.projects else stage.embeds + stage.projects
        norm = of_rank(TensorSize((self.decoder.dim,), "vector"), config) if stage.projects else 0
        return of_layers + embeddings * of_rank(self.embedding, config) + norm

    def adapter(self, lora: LoRAConfig, stage: Stage | None = None) -> int:
        """Parameters of an adapter over the model, or over a stage, as every rank holds it."""
        kinds = self.decoder.kinds if stage is None else stage.kinds
        sizes = [sum(each.count * sum(each.shape) for each in self._adapted(lora, kind)) for kind in (0, 1)]
        head = sum(self.embedding.shape) if lora.train_unembed and (stage is None or stage.projects) else 0
        return lora.rank * (sum(kinds.count(kind) * sizes[kind] for kind in (0, 1)) + head)

    def _adapted(self, lora: LoRAConfig, kind: int) -> Iterator[TensorSize]:
        """Projections of a layer that are adapted: of a mixture, attention's alone."""
        decoder = self.decoder
        if lora.train_attn:
            matrices = (each for each in decoder.attention(kind) if each.kind in ("matrix", "whole"))
            yield from (each for each in matrices if each != decoder.absorbed)
        if lora.train_mlp and decoder.moe is None:
            yield from decoder.network(kind)
