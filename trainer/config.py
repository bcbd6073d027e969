"""The layout of a trainer and how it computes. Learning rate, clip norm and the like come with each step instead."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from rl.checks import check_gpus, check_known
from rl.deadlines import Deadlines
from rl.types import Head
from trainer.engine_table import ENGINES

ComputeDtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]
PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]
Float8Recipe = Literal["none", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """A trainer with one process per rank.

    The number of ranks is the product of the degrees `pipeline_parallel * data_parallel_replicate *
    data_parallel_shard * context_parallel * tensor_parallel`. Consecutive ranks belong to one tensor-parallel group,
    consecutive groups of these to one context-parallel group, and so on.
    """

    model: Path = Path()
    """Directory of a Hugging Face causal language model: config.json, *.safetensors, tokenizer files. Recipes leave it
    out: a loop sets it to its own model."""
    engine: str = "torchtitan"
    """The backend that computes, by its name in `trainer.engine_table.ENGINES`."""
    head: Head = "lm"
    """What the model ends in. `lm` is the language model's own output projection. `value` gives one value per position,
    which makes the trainer a critic; it starts at zero unless `model` has a `score.weight`."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of matrix products. Parameters, gradients and optimizer state are always float32."""
    data_parallel_shard: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded."""
    data_parallel_replicate: int = 1
    """Replicas of the sharded group (HSDP)."""
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
    ranks; it must divide `data_parallel_shard * context_parallel * tensor_parallel` and the number of experts."""
    max_tokens_per_microbatch: int = 4096
    """Most tokens of one packed forward and backward pass, which a context-parallel group splits. Bounds activation
    memory. A longer datum runs alone."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Which activations are recomputed in the backward pass instead of kept."""
    compile: bool = False
    """Whether layers go through `torch.compile`, which makes the first calls slower and, on a GPU, later ones faster. A
    CPU gains nothing: attention is not compiled there, and experts and tensor parallelism are refused."""
    float8: Float8Recipe = "none"
    """Recipe of torchao, applied by torchtitan's converter, for the layers' matrix products in float8. Scoring, routers
    and experts stay in `compute_dtype`. Needs a GPU with float8 instructions."""
    num_threads: int = 1
    """Threads of each rank on the CPU."""
    gpus: tuple[int | str, ...] | None = None
    """The GPU of each rank, by its number, UUID or MIG name in `CUDA_VISIBLE_DEVICES`. Meshes may share GPUs that they
    both name. None takes the next free ones."""
    seed: int = 0
    """Seed of each rank's random state."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """How long calls may take before the ranks count as hung."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        check_known("TrainerConfig.engine", self.engine, ENGINES)
        choices = {
            "head": get_args(Head),
            "compute_dtype": get_args(ComputeDtype),
            "activation_checkpointing": get_args(ActivationCheckpointing),
            "pipeline_schedule": get_args(PipelineSchedule),
            "float8": get_args(Float8Recipe),
        }
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"TrainerConfig.{name} is {getattr(self, name)!r}; it must be one of {accepted}")
        if self.float8 != "none" and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"TrainerConfig.float8 is {self.float8!r} and compute_dtype is {self.compute_dtype!r}; float8 matrix "
                "products end in bfloat16, so compute_dtype must be 'bfloat16'"
            )
        for name in (
            "data_parallel_shard",
            "data_parallel_replicate",
            "tensor_parallel",
            "context_parallel",
            "pipeline_parallel",
            "expert_parallel",
            "max_tokens_per_microbatch",
            "num_threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainerConfig.{name} is {getattr(self, name)}; it must be at least 1")
        check_gpus("TrainerConfig", self.gpus, self.num_ranks)
        sharing = self.data_parallel_shard * self.context_parallel * self.tensor_parallel
        if sharing % self.expert_parallel:
            raise ValueError(
                f"TrainerConfig.expert_parallel is {self.expert_parallel}; it must divide data_parallel_shard x "
                f"context_parallel x tensor_parallel, which is {sharing}: "
                f"{[n for n in range(1, sharing + 1) if sharing % n == 0]}"
            )

    def check_entropy(self) -> None:
        """Raises ValueError if the head has no entropies. Called when entropies are asked for."""
        if self.head != "lm":
            raise ValueError(f"entropy was asked for; a trainer with head={self.head!r} has none")

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
    def num_stages(self) -> int:
        """Number of pipeline stages into which the layers are cut."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "Interleaved1F1B" else 1)
