"""The layout of a trainer, how it computes, and the environment of its processes.

Learning rate, clip norm and the like come with each step instead. Loads no torch: the controller needs it early.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PositiveInt

from rl.configuration import AnyPath, Gpus, Rare, Seed, check_gpus, configuration, one_of
from rl.deadlines import Deadlines
from rl.lora import LoRAConfig
from rl.system.hardware import cpu_malloc_env, cpu_thread_env, sees_gpu
from rl.types import AdamParams, Head, HeadDtype, MuonParams, Placement
from trainer.engine_table import all_engines, find_engine

ComputeDtype = Literal["bfloat16", "float32"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Float8Recipe = Literal["none", "rowwise", "rowwise_with_gw_hp"]
PipelineSchedule = Literal["1F1B", "Interleaved1F1B"]
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # what a user has set stays


@configuration
class LayoutConfig:
    """The degrees of parallelism.

    The number of ranks is the product of the degrees `pipeline_parallel * data_parallel_replicate *
    data_parallel_shard * context_parallel * tensor_parallel`. Consecutive ranks belong to one tensor-parallel group,
    consecutive groups of these to one context-parallel group, and so on.
    """

    data_parallel_shard: PositiveInt = 1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP, ZeRO-3). With the engine `megatron`
    each rank computes with a whole model, and master weights and optimizer state are sharded (ZeRO-1)."""
    data_parallel_replicate: Rare[PositiveInt] = 1
    """Replicas of the sharded group (HSDP), or of everything if nothing is sharded."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share every matrix product; must divide the attention heads and the key-value heads."""
    sequence_parallel: Rare[bool] = True
    """Whether a tensor-parallel group also splits the tokens between matrix products, which saves memory."""
    context_parallel: PositiveInt = 1
    """Ranks that split the tokens of every row, for long sequences. Parameters are sharded over them too."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that each hold some of the layers and pass micro-batches on to the next. Embeddings must not be tied."""
    pipeline_schedule: Rare[PipelineSchedule] = "1F1B"
    """The order in which a pipeline's ranks compute. With `1F1B` each rank holds one stage of layers; with
    `Interleaved1F1B` (arXiv 2104.04473) it holds two, which idle less and communicate more."""
    expert_parallel: PositiveInt = 1
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


def _check_steps(text: str) -> str:
    steps = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if text and (steps is None or int(steps[1]) > int(steps[2])):
        raise ValueError("Input should be FIRST:LAST, as 3:5")
    return text


@configuration
class TrainerConfig(LayoutConfig):
    """A trainer with one process per rank. Its ranks are arranged as `LayoutConfig` says."""

    model: Rare[AnyPath] = Path()
    """Directory of a Hugging Face causal language model: config.json, *.safetensors, tokenizer files. Recipes leave it
    out: a loop sets it to its own model."""
    engine: Annotated[str, one_of(all_engines, "engines")] = "torchtitan"
    """The backend that computes, by its name in `trainer.engine_table`."""
    head: Rare[Head] = "lm"
    """What the model ends in. `lm` is the language model's own output projection. `value` gives one value per position,
    which makes the trainer a critic; it starts at zero unless `model` has a `score.weight`."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of matrix products. Parameters, gradients and optimizer state are float32; only a frozen model, under
    `frozen` or `lora`, is kept in this dtype. `docs/memory.md` has the bytes per parameter."""
    head_dtype: Rare[HeadDtype | None] = None
    """Dtype of the logits' product. "float32" widens hidden states and output projection of `compute_dtype`, which
    takes a part of the mismatch with a generator off, and time. The generator's must be the same. None:
    `compute_dtype`."""
    moments_dtype: Rare[ComputeDtype] = "float32"
    """Dtype in which AdamW's moments are kept. "bfloat16" saves 4 bytes a parameter; updates are still computed in
    float32. It needs `AdamParams.beta2` of at most 0.99."""
    frozen: Rare[bool] = False
    """Whether the model is never trained, as a reference or a teacher is not. It is kept in `compute_dtype`, and calls
    that would train it are refused. `Launcher.reference` and distillation's teacher set it."""
    lora: Rare[LoRAConfig | None] = None
    """If given, the model is frozen and what is trained are adapters over it, made by `Engine.adapter`. A loop trains
    one adapter with these values. None trains the model itself."""
    train_vision: Rare[bool] = False
    """Whether the parameters that read images are trained, too, or with `lora` adapted. Otherwise they stay as they
    are."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Most tokens of one packed forward and backward pass, which a context-parallel group splits. Bounds activation
    memory. A longer datum runs alone."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Which activations are recomputed in the backward pass instead of kept."""
    compile: bool = False
    """Whether layers go through `torch.compile`, which makes the first calls slower and, on a GPU, later ones faster. A
    CPU gains nothing: attention is not compiled there, and experts and tensor parallelism are refused."""
    float8: Rare[Float8Recipe] = "none"
    """Recipe of torchao, applied by torchtitan's converter, for the layers' matrix products in float8. Scoring, routers
    and experts stay in `compute_dtype`. Needs a GPU with float8 instructions."""
    num_threads: PositiveInt = 1
    """Threads of each rank on the CPU."""
    gpus: Rare[Gpus] = None
    """The GPU of each rank, by its number, UUID or MIG name in `CUDA_VISIBLE_DEVICES`. Meshes may share GPUs that they
    both name. None takes the next free ones."""
    placement: Rare[Placement] = "split"
    """Whether it shares its GPUs with other meshes and takes turns with them. A loop sets it to its own `placement`."""
    seed: Rare[Seed] = 0
    """Seed of each rank's random state."""
    engine_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further options for an engine that takes them: with `megatron`, fields of Megatron-core's `TransformerConfig` by
    their own names, and `model_provider`; with `megatron_fsdp`, options of `fully_shard`."""
    profile_steps: Rare[Annotated[str, AfterValidator(_check_steps)]] = ""
    """Optimizer steps that torch's profiler records, as "3:5": from 3 to 5. `docs/slow_step.md` says where."""
    deadlines: Rare[Deadlines] = field(default_factory=Deadlines)
    """How long calls may take before the ranks count as hung."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, the value and what is accepted."""
        if self.float8 != "none" and self.compute_dtype != "bfloat16":
            raise ValueError(
                f"TrainerConfig.float8 is {self.float8!r} and compute_dtype is {self.compute_dtype!r}; float8 matrix "
                "products end in bfloat16, so compute_dtype must be 'bfloat16'"
            )
        check_gpus("TrainerConfig", self.gpus, self.num_ranks)

    @property
    def is_frozen(self) -> bool:
        """Whether the model itself is never trained: there may be adapters over it."""
        return self.frozen or self.lora is not None

    def check_entropy(self) -> None:
        """Raises ValueError if the head has no entropies. Called when entropies are asked for."""
        if self.head != "lm":
            raise ValueError(f"entropy was asked for; a trainer with head={self.head!r} has none")

    def check_optimizer(self, params: AdamParams) -> None:
        """Raises ValueError if the engine cannot take a step of this kind."""
        if not isinstance(params, AdamParams):  # pyright: ignore[reportUnnecessaryIsInstance] - unchecked callers
            raise ValueError(f"optim_step was given {params!r:.100}; it takes AdamParams")
        if isinstance(params, MuonParams) and not find_engine(self.engine).takes_muon:
            able = ", ".join(name for name, entry in all_engines().items() if entry.takes_muon)
            raise ValueError(
                f"the engine {self.engine!r} has no Muon step; use AdamParams, or one of the engines {able}"
            )

    def check_routes(self) -> None:
        """Raises ValueError if the engine cannot replay the experts that a generator chose."""
        able = ", ".join(name for name, entry in all_engines().items() if entry.replays_routes)
        if not find_engine(self.engine).replays_routes:
            raise ValueError(f"the engine {self.engine!r} replays no routes; use one of the engines {able}, or none")
        if self.compile:
            raise ValueError("TrainerConfig.compile is True, which replays no routes; switch one of the two off")


def trainer_env(config: TrainerConfig, *, has_gpu: bool | None = None) -> dict[str, str]:
    """Environment variables of each trainer process, to be set before it imports anything.

    `has_gpu` says whether the host that computes has a GPU; None stands for this host.
    """
    env = cpu_thread_env(config.num_threads)
    if not (sees_gpu() if has_gpu is None else has_gpu):
        env |= cpu_malloc_env()  # saves a quarter of the time of a small model's step
    elif not os.environ.keys() & set(_ALLOCATOR):
        # Every row has another length; without this, freed blocks fit no later row and memory falls to pieces.
        env[_ALLOCATOR[0]] = "expandable_segments:True"
    return env
