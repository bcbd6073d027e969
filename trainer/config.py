"""The layout of a trainer and how it computes. Learning rate, clip norm and the like come with each step instead."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rl.checks import check_gpus
from rl.lora import LoRAConfig
from rl.system.deadlines import Deadlines
from rl.types import Head, Placement
from trainer.engine_table import find_engine
from trainer.layout import LayoutConfig, PipelineSchedule

ComputeDtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Float8Recipe = Literal["none", "rowwise", "rowwise_with_gw_hp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(LayoutConfig):
    """A trainer with one process per rank. Its ranks are arranged as `LayoutConfig` says."""

    model: Path = Path()
    """Directory of a Hugging Face causal language model: config.json, *.safetensors, tokenizer files. Recipes leave it
    out: a loop sets it to its own model."""
    engine: str = "torchtitan"
    """The backend that computes, by its name in `trainer.engine_table`."""
    head: Head = "lm"
    """What the model ends in. `lm` is the language model's own output projection. `value` gives one value per position,
    which makes the trainer a critic; it starts at zero unless `model` has a `score.weight`."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of matrix products. Parameters, gradients and optimizer state are float32; only a frozen model, under
    `frozen` or `lora`, is kept in this dtype. `docs/memory.md` has the bytes per parameter."""
    moments_dtype: ComputeDtype = "float32"
    """Dtype in which AdamW's moments are kept. "bfloat16" saves 4 bytes a parameter; updates are still computed in
    float32. It needs `AdamParams.beta2` of at most 0.99."""
    frozen: bool = False
    """Whether the model is never trained, as a reference or a teacher is not. It is kept in `compute_dtype`, and calls
    that would train it are refused. `Launcher.reference` and distillation's teacher set it."""
    lora: LoRAConfig | None = None
    """If given, the model is frozen and what is trained are adapters over it, made by `Engine.adapter`. A loop trains
    one adapter with these values. None trains the model itself."""
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
    placement: Placement = "split"
    """Whether it shares its GPUs with other meshes and takes turns with them. A loop sets it to its own `placement`."""
    seed: int = 0
    """Seed of each rank's random state."""
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further options for an engine that takes them: with `megatron`, fields of Megatron-core's `TransformerConfig` by
    their own names, and `model_provider`; with `megatron_fsdp`, options of `fully_shard`; see `docs/megatron.md`."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    """How long calls may take before the ranks count as hung."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        find_engine(self.engine)
        choices = {
            "head": get_args(Head),
            "compute_dtype": get_args(ComputeDtype),
            "moments_dtype": get_args(ComputeDtype),
            "activation_checkpointing": get_args(ActivationCheckpointing),
            "pipeline_schedule": get_args(PipelineSchedule),
            "float8": get_args(Float8Recipe),
            "placement": get_args(Placement),
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

    @property
    def is_frozen(self) -> bool:
        """Whether the model itself is never trained: there may be adapters over it."""
        return self.frozen or self.lora is not None

    def check_entropy(self) -> None:
        """Raises ValueError if the head has no entropies. Called when entropies are asked for."""
        if self.head != "lm":
            raise ValueError(f"entropy was asked for; a trainer with head={self.head!r} has none")
