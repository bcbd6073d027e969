"""Seconds of a step and of its phases: operations and bytes over rates, and overheads, which `gpus.py` states."""

from collections.abc import Mapping
from dataclasses import dataclass

from generator.config import GeneratorConfig
from ownloop_plan.gpus import GPU, Efficiency
from ownloop_plan.memory import cache_bytes_per_token, state_bytes, versions_on_gpu
from ownloop_plan.sizes import ModelSize
from trainer.config import TrainerConfig

_BF16, _FLOAT32 = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step samples and trains on."""

    num_prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    """Mean length."""

    @property
    def num_sequences(self) -> int:
        """Completions of a step."""
        return self.num_prompts * self.group_size

    @property
    def trained_tokens(self) -> int:
        """Tokens that the trainer computes. A prompt is computed once for its group."""
        return self.num_prompts * (self.prompt_tokens + self.group_size * self.completion_tokens)

    def num_rows(self, trainer: TrainerConfig) -> int:
        """Rows that each of a trainer's ranks computes for a step."""
        return max(1, -(-self.trained_tokens // (trainer.num_data_parallel_ranks * trainer.max_tokens_per_microbatch)))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds by phase."""

    phases: Mapping[str, float]
    overlaps: bool
    """Whether sampling and training run at the same time, as in `grpo_async`."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        if not self.overlaps:
            return sum(self.phases.values())
        side = {"generate": self.phases["generate"], "train": self.phases["train"] + self.phases["optimizer"]}
        return max(side.values()) + sum(value for name, value in self.phases.items() if name in ("push", "pull"))


def num_gpus(trainer: TrainerConfig, generator: GeneratorConfig) -> int:
    """GPUs of trainer and generator."""
    sampling = generator.num_copies * generator.tensor_parallel
    return max(trainer.num_ranks, sampling) if trainer.placement == "colocated" else trainer.num_ranks + sampling


def step_time(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency,
    *, overlaps: bool = False, gpus_per_host: int = 8,
) -> StepTime:  # fmt: skip
    """A step of a loop that samples, trains, and takes the new weights over."""
    one_host = num_gpus(trainer, generator) <= gpus_per_host
    phases = {
        "generate": generate_seconds(model, generator, work, gpu, efficiency),
        "train": train_seconds(model, trainer, work, gpu, efficiency),
        "optimizer": _optimizer_seconds(model, trainer, gpu) + efficiency.call_overhead_s,
        **_sync_seconds(model, trainer, generator, gpu, efficiency, one_host),
    }
    if trainer.placement == "colocated":
        phases["turns"] = _turn_seconds(model, trainer, gpu, efficiency)
    return StepTime(phases, overlaps and trainer.placement == "split")


def _turn_seconds(model: ModelSize, trainer: TrainerConfig, gpu: GPU, efficiency: Efficiency) -> float:
    """Parameters come to the GPU and go back; moments come in pieces at a step, while others go back.

    Gradients do not move: a step has used them up.
    """
    of_rank, float32 = model.of_rank(trainer), trainer.compute_dtype == "float32"
    if trainer.is_frozen:
        moved = 2 * of_rank * (_FLOAT32 if float32 else _BF16)
    else:
        moved = 2 * of_rank * (_FLOAT32 + (_BF16 if trainer.moments_dtype == "bfloat16" else _FLOAT32))
    return moved / (gpu.pcie_rate * efficiency.copies)


def operations(model: ModelSize, trainer: TrainerConfig, work: Work) -> float:
    """Floating-point operations of a step's forward and backward passes, as `rl.data.packing.ModelFlops` counts them.

    With full checkpointing the forward pass is computed twice.
    """
    d = model.decoder.dim
    scored = work.num_sequences * work.completion_tokens
    length = work.prompt_tokens + work.completion_tokens / 2
    pairs = scored * length + work.num_prompts * work.prompt_tokens**2 / 2
    linear = (
        2.0 * (model.active + model.decoder.rule_products) * work.trained_tokens
        + 2.0 * d * model.decoder.vocab_size * scored
    )
    attention = 2.0 * model.decoder.num_attending * (model.decoder.queries + model.decoder.values) * pairs
    passes = (2 if trainer.is_frozen else 3) + (1 if trainer.activation_checkpointing == "full" else 0)
    return passes * linear + (passes if not trainer.is_frozen else passes + 1) * attention


def train_seconds(model: ModelSize, trainer: TrainerConfig, work: Work, gpu: GPU, efficiency: Efficiency) -> float:
    """Forward and backward passes, and the overhead of datums. A pipeline idles for (stages - 1) of its rows."""
    seconds = operations(model, trainer, work) / (trainer.num_ranks * gpu.operations * efficiency.train)
    rows = work.num_rows(trainer)
    overhead = work.num_sequences * efficiency.datum_overhead_s / trainer.num_data_parallel_ranks
    return seconds * (rows + trainer.pipeline_parallel - 1) / rows + overhead


def _optimizer_seconds(model: ModelSize, trainer: TrainerConfig, gpu: GPU) -> float:
    """AdamW reads and writes parameters, moments and gradients: 28 bytes a parameter."""
    trained = model.of_rank(trainer)
    if trainer.is_frozen:
        trained = 0 if trainer.lora is None else model.adapter(trainer.lora)
    return 28 * trained / gpu.memory_rate


def generate_seconds(
    model: ModelSize, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency
) -> float:
    """Prompts are computed once; then each token reads the weights that it needs, and keys and values of its batch.

    States of delta rules are read and written.
    """
    per_replica = -(-work.num_sequences // generator.num_replicas)
    batch = min(per_replica, generator.max_num_seqs or gpu.num_seqs)
    num_waves = -(-per_replica // batch)
    tensors = [(count * each.numel, each.kind) for count, layer in model.layers for each in layer]
    others = sum(numel for numel, kind in tensors if kind != "expert")
    experts = sum(numel for numel, kind in tensors if kind == "expert")
    if model.decoder.moe is not None:
        experts = experts * min(1.0, batch * model.decoder.moe.experts_per_token / model.decoder.moe.num_experts)
    weights = (others + experts + model.embedding.numel) * _BF16 / generator.tensor_parallel
    context = work.prompt_tokens + work.completion_tokens / 2
    cache = batch * (context * cache_bytes_per_token(model, generator) + 2 * state_bytes(model, generator))
    token = (weights + cache) / (gpu.memory_rate * efficiency.decode) + efficiency.decode_overhead_s
    token += _sum_seconds(model, generator, batch, gpu, efficiency)
    prompts = (
        work.num_prompts * work.prompt_tokens * 2.0 * model.active / generator.num_replicas / generator.tensor_parallel
    )
    seconds = num_waves * work.completion_tokens * token + prompts / (gpu.operations * efficiency.prefill)
    return seconds + per_replica * efficiency.completion_overhead_s


def _sum_seconds(model: ModelSize, generator: GeneratorConfig, tokens: int, gpu: GPU, efficiency: Efficiency) -> float:
    """What tensor-parallel ranks take to add the outputs of attention and of the feed-forward part of every layer."""
    ranks = generator.tensor_parallel
    if ranks == 1:
        return 0.0
    sent = 2 * (ranks - 1) / ranks * tokens * model.decoder.dim * _BF16 / (gpu.nvlink_rate * efficiency.copies)
    return 2 * model.decoder.num_layers * (efficiency.sum_overhead_s + sent)


def _sync_seconds(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, gpu: GPU, efficiency: Efficiency,
    one_host: bool,
) -> dict[str, float]:  # fmt: skip
    """A push casts and writes each rank's shards; a pull reads each generator rank's part over its own link.

    On one host both go over PCIe, unless weights lie in memory of the trainer's GPUs.
    """
    numel = model.numel
    if trainer.is_frozen:
        numel = 0 if trainer.lora is None else model.adapter(trainer.lora)
    by_gpu = bool(versions_on_gpu(model, trainer, generator.weight_transport, gpu, one_host=one_host))
    link = (gpu.nvlink_rate if by_gpu else gpu.pcie_rate if one_host else gpu.network_rate) * efficiency.copies
    push = numel * (_FLOAT32 + _BF16) / trainer.num_ranks / gpu.memory_rate
    push += 0 if by_gpu or not one_host else numel * _BF16 / trainer.num_ranks / link
    pull = numel * _BF16 / generator.tensor_parallel / link
    return {"push": push + efficiency.call_overhead_s / 2, "pull": pull + efficiency.call_overhead_s / 2}
