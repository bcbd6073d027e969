"""How a trainer is laid out and how it computes. What a step does (learning rate, clip) comes with the call instead."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rl.checks import check_known
from rl.types import Head
from trainer.engine_table import ENGINES

ComputeDtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]
PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]
Float8Recipe = Literal["none", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """A trainer of as many ranks as the product of its parallel degrees, one process each.

    The degrees are `pipeline_parallel * data_parallel_replicate * data_parallel_shard * context_parallel *
    tensor_parallel`; neighbouring ranks differ in the last of these first.
    """

    model: Path = Path()
    """Directory of a Hugging Face causal language model: config.json, *.safetensors, tokenizer files. Recipes leave it
    out: a loop sets it to its own model."""
    engine: str = "torchtitan"
    """The backend that computes, by its name in `trainer.engine_table.ENGINES`."""
    head: Head = "lm"
    """What the model ends in: `lm` the language model's own output projection, `value` one value per position, which
    makes the trainer a critic. A value head starts at zero unless `model` has a `score.weight`."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of matrix products. Parameters, gradients and optimizer state are float32 in either case."""
    data_parallel_shard: int = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    data_parallel_replicate: int = 1
    """Replicas of that sharded group (HSDP)."""
    tensor_parallel: int = 1
    """Ranks that share every matrix product; must divide the attention heads and the key-value heads."""
    sequence_parallel: bool = True
    """Whether a tensor-parallel group also shares out the tokens between its matrix products, which saves memory."""
    context_parallel: int = 1
    """Ranks that share the tokens of every row, for long sequences; parameters are sharded over them too."""
    pipeline_parallel: int = 1
    """Ranks that each hold some of the layers and hand micro-batches on to the next; embeddings must not be tied."""
    pipeline_schedule: PipelineSchedule = "1F1B"
    """In which order a pipeline's ranks compute: one stage of layers each, or two stages each, which idle less and
    communicate more (`Interleaved1F1B`, arXiv 2104.04473)."""
    expert_parallel: int = 1
    """Ranks that share out the experts of a mixture-of-experts model whole. They are not further ranks: the degree must
    divide `data_parallel_shard * context_parallel * tensor_parallel` and the number of experts."""
    max_tokens_per_microbatch: int = 4096
    """Tokens of one packed forward and backward pass, shared by a context-parallel group; bounds activation memory. A
    longer datum runs alone."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that are recomputed in the backward pass instead of kept."""
    compile: bool = False
    """Whether layers go through `torch.compile`: slower first calls, faster later ones on a GPU. A CPU gains nothing;
    there attention stays as it is, and experts and tensor parallelism are refused."""
    float8: Float8Recipe = "none"
    """Matrix products of layers in float8, by torchtitan's converter and a recipe of torchao; scoring, routers and
    experts stay in `compute_dtype`. Needs a GPU that has float8."""
    num_threads: int = 1
    """Threads of each rank on the CPU."""
    seed: int = 0
    """Seed of the rank's random state."""

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
        sharing = self.data_parallel_shard * self.context_parallel * self.tensor_parallel
        if sharing % self.expert_parallel:
            raise ValueError(
                f"TrainerConfig.expert_parallel is {self.expert_parallel}; it must divide data_parallel_shard x "
                f"context_parallel x tensor_parallel, which is {sharing}: "
                f"{[n for n in range(1, sharing + 1) if sharing % n == 0]}"
            )

    def check_entropy(self) -> None:
        """Raises ValueError when entropies are asked of a head that has none."""
        if self.head != "lm":
            raise ValueError(f"entropy was asked for; a trainer with head={self.head!r} has none")

    @property
    def num_ranks(self) -> int:
        """Processes of this trainer."""
        return self.num_data_parallel_ranks * self.num_model_parallel_ranks

    @property
    def num_data_parallel_ranks(self) -> int:
        """Ranks, or groups of neighbouring ranks, that are given different data."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def num_model_parallel_ranks(self) -> int:
        """Ranks that are given the same data, and answer alike."""
        return self.pipeline_parallel * self.context_parallel * self.tensor_parallel

    def data_parallel_rank(self, rank: int) -> int:
        """Which of the `num_data_parallel_ranks` shares of a batch a rank is given."""
        return rank // (self.context_parallel * self.tensor_parallel) % self.num_data_parallel_ranks

    @property
    def num_stages(self) -> int:
        """Parts that the layers are cut into."""
        if self.pipeline_parallel == 1:
            return 1
        return self.pipeline_parallel * (2 if self.pipeline_schedule == "Interleaved1F1B" else 1)
