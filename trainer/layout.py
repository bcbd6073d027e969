"""How the ranks of a trainer divide the work among them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """The degrees of parallelism.

    The number of ranks is the product of the degrees `pipeline_parallel * data_parallel_replicate *
    data_parallel_shard * context_parallel * tensor_parallel`. Consecutive ranks belong to one tensor-parallel group,
    consecutive groups of these to one context-parallel group, and so on.
    """

    data_parallel_shard: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP, ZeRO-3). With the engine `megatron`
    each rank computes with a whole model, and master weights and optimizer state are sharded (ZeRO-1)."""
    data_parallel_replicate: int = 1
    """Replicas of the sharded group (HSDP), or of everything if nothing is sharded."""
    tensor_parallel: int = 1
    """Ranks that share every matrix product; must divide the attention heads and the key-value heads."""
    sequence_parallel: bool = True
    """Whether a tensor-parallel group also splits the tokens between matrix products, which saves memory."""
    context_parallel: int = 1
    """Ranks that split the tokens of every row, for long sequences. Parameters are sharded over them too."""
    pipeline_parallel: int = 1
    """Ranks that each hold some of the layers and pass micro-batches on to the next. Embeddings must not be tied."""
    pipeline_schedule: PipelineSchedule = "1F1B"
    """The order in which a pipeline's ranks compute. With `1F1B` each rank holds one stage of layers; with
    `Interleaved1F1B` (arXiv 2104.04473) it holds two, which idle less and communicate more."""
    expert_parallel: int = 1
    """Ranks over which the experts of a mixture-of-experts model are distributed, each expert whole. The degree adds no
    ranks; it must divide the number of experts and `data_parallel_shard * context_parallel * tensor_parallel`, with the
    engine `megatron` also times `data_parallel_replicate`."""

    @property
    def num_ranks(self) -> int:
        """Processes of this trainer."""
        return self.num_data_parallel_ranks * self.num_model_parallel_ranks

    @property
    def num_data_parallel_ranks(self) -> int:
        """Number of ranks, or groups of ranks, that get different data."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def num_model_parallel_ranks(self) -> int:
        """Number of ranks that get the same data and return the same output."""
        return self.pipeline_parallel * self.context_parallel * self.tensor_parallel

    def data_parallel_rank(self, rank: int) -> int:
        """Index of the local batch that a rank gets, of `num_data_parallel_ranks`."""
        return rank // (self.context_parallel * self.tensor_parallel) % self.num_data_parallel_ranks

    @property
    def num_token_shards(self) -> int:
        """Ranks of a tensor-parallel group among which the tokens of a row are divided between matrix products."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages into which the layers are cut."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "Interleaved1F1B" else 1)


def parse_layout(text: str) -> Mapping[str, Any]:
    """`tensor_parallel=2,sequence_parallel=False` as fields. Raises ValueError, naming those there are."""
    values: dict[str, Any] = {}
    types = {field.name: type(field.default) for field in fields(LayoutConfig)}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in types:
            raise ValueError(f"layout is {text!r}; it must be like tensor_parallel=2, with fields {', '.join(types)}")
        try:
            values[name] = {"True": True, "False": False}[value] if types[name] is bool else types[name](value)
        except (ValueError, KeyError):
            needed = "True or False" if types[name] is bool else "a whole number"
            raise ValueError(f"layout {name} is {value!r}; it must be {needed}") from None
    return values
