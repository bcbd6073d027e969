"""Layouts on N GPUs, ranked by the time of a step: every layout that the engine accepts and that fits is compared."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from controller.planning.gpus import GPU, Efficiency
from controller.planning.memory import generator_memory, trainer_memory, version_bytes
from controller.planning.sizes import ModelSize
from controller.planning.times import StepTime, Work, step_time, train_seconds
from generator.config import GeneratorConfig
from rl.system.hf_config import read_config
from trainer.config import TrainerConfig
from trainer.engine_table import find_engine
from trainer.engines.model_check import LayoutCheck

_CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Layout:
    """One that fits."""

    trainer: TrainerConfig
    generator: GeneratorConfig
    time: StepTime

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole run."""
        sampling = self.generator.num_copies * self.generator.tensor_parallel
        if self.generator.placement == "colocated":
            return max(self.trainer.num_ranks, sampling)
        return self.trainer.num_ranks + sampling


def find_layouts(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency,
    *, num_gpus: int, gpus_per_host: int, overlaps: bool, generator_ranks: int | None = None, most: int = 10,
) -> list[Layout]:  # fmt: skip
    """The fastest layouts on at most `num_gpus` GPUs. Tensor parallelism stays within a host.

    `generator_ranks` are the most of a generator that are proven. Raises ValueError if no replica of it fits a host.
    """
    of_replica = min(gpus_per_host, generator_ranks or gpus_per_host)
    samplers = list(_samplers(model, generator, gpu, num_gpus, of_replica))
    if not samplers:
        limit = "stays within a host" if of_replica == gpus_per_host else "is proven up to so many ranks"
        raise ValueError(
            f"a generator's replica {limit}: {of_replica} GPUs of {gpu.memory_gib:.0f} GiB do not hold"
            f" {2 * model.numel / 1e9:.0f} GB of weights; a smaller model or larger GPUs would"
        )
    trainers = _best_trainers(model, trainer, work, gpu, efficiency, num_gpus, gpus_per_host)
    found: list[Layout] = []
    for sampler in samplers:
        taken = sampler.num_copies * sampler.tensor_parallel
        for num_ranks, candidate in trainers.items():
            if max(num_ranks, taken) > num_gpus if sampler.placement == "colocated" else num_ranks + taken > num_gpus:
                continue
            time = step_time(model, candidate, sampler, work, gpu, efficiency, overlaps=overlaps)
            found.append(Layout(candidate, sampler, time))
    return sorted(found, key=lambda layout: (layout.time.step, layout.num_gpus))[:most]


def _best_trainers(
    model: ModelSize, trainer: TrainerConfig, work: Work, gpu: GPU, efficiency: Efficiency, num_gpus: int, per_host: int
) -> dict[int, TrainerConfig]:
    """For each number of ranks, the fastest trainer that fits and that the engine accepts."""
    best: dict[int, tuple[float, TrainerConfig]] = {}
    least = model.numel * (2 if trainer.is_frozen else 12) // gpu.memory_bytes  # ranks that share the model
    for candidate in _trainers(trainer, model, (least, num_gpus), per_host):
        if not trainer_memory(model, candidate, gpu, accumulates=work.num_rows(candidate) > 1).fits:
            continue
        seconds = _seconds(model, candidate, work, gpu, efficiency)
        known = best.get(candidate.num_ranks)
        if (known is None or seconds < known[0]) and _is_accepted(candidate):
            best[candidate.num_ranks] = (seconds, candidate)
    return {num_ranks: candidate for num_ranks, (_, candidate) in best.items()}


def _seconds(model: ModelSize, config: TrainerConfig, work: Work, gpu: GPU, efficiency: Efficiency) -> float:
    """Time of the trainer, with what its ranks exchange: FSDP's gathers and the tensor-parallel sums of each layer."""
    rows = work.num_rows(config)
    stage = model.numel / config.pipeline_parallel / config.tensor_parallel
    sharded = config.data_parallel_shard * config.context_parallel > 1
    gathered = (3 * 2 * stage * rows if sharded else 0.0) / (gpu.network_rate * efficiency.copies)
    summed = 0.0
    if config.tensor_parallel > 1:
        tokens = work.trained_tokens / config.num_data_parallel_ranks
        summed = 8 * 2 * tokens * model.decoder.dim * model.decoder.num_layers / config.pipeline_parallel
        summed /= gpu.nvlink_rate * efficiency.copies
    if config.data_parallel_replicate > 1:  # gradients, once a step
        summed += 2 * 4 * model.of_rank(config) / (gpu.network_rate * efficiency.copies)
    computed = train_seconds(model, config, work, gpu, efficiency)
    return max(computed, gathered) + summed  # gathers run beside the computation


def _trainers(
    config: TrainerConfig, model: ModelSize, num_ranks: tuple[int, int], per_host: int
) -> Iterator[TrainerConfig]:
    """All powers of two whose product is within `num_ranks`."""
    least, num_gpus = num_ranks
    experts = 1 if model.decoder.moe is None else model.decoder.moe.num_experts
    powers = [1 << i for i in range(num_gpus.bit_length()) if 1 << i <= num_gpus]
    for tensor, pipeline, context, expert, shard, replicate in itertools.product(
        [n for n in powers if n <= per_host],
        [n for n in powers if n <= min(16, model.decoder.num_layers)],
        [n for n in powers if n <= 8],
        [n for n in powers if n <= min(64, experts)],
        powers,
        [n for n in powers if n <= 16],
    ):
        sharing = tensor * pipeline * context * shard
        if not least <= sharing <= num_gpus // replicate or shard * context * tensor % expert:
            continue
        for checkpointing in _CHECKPOINTING:
            yield replace(
                config,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                context_parallel=context,
                expert_parallel=expert,
                data_parallel_shard=shard,
                data_parallel_replicate=replicate,
                activation_checkpointing=checkpointing,
                gpus=None,
            )


def check_layout(config: TrainerConfig) -> None:
    """Raises ValueError as the engine does, for a model directory that may have no weights, and for any hardware."""
    check: LayoutCheck = resolve_name(find_engine(config.engine).layout_check)
    check(replace(config, compile=False, float8="none"), read_config(config.model))


def _is_accepted(config: TrainerConfig) -> bool:
    try:
        check_layout(config)
    except ValueError:
        return False
    return True


def _samplers(
    model: ModelSize, config: GeneratorConfig, gpu: GPU, num_gpus: int, per_host: int
) -> Iterator[GeneratorConfig]:
    """Numbers of replicas, and of ranks of each, that leave room for `max_num_seqs` sequences."""
    for tensor in (n for n in (1, 2, 4, 8) if n <= per_host and model.decoder.num_heads % n == 0):
        candidate = replace(config, tensor_parallel=tensor, gpus=None)
        if generator_memory(model, candidate, gpu).parts["keys and values"] <= 0:
            continue
        replicas = 1
        while replicas * tensor <= num_gpus:
            yield replace(candidate, num_replicas=replicas)
            replicas *= 2


def fits_with_versions(model: ModelSize, trainer: TrainerConfig, gpu: GPU) -> bool:
    """Whether weights on their way may lie on the trainer's GPUs: two versions take at most a tenth of one."""
    return version_bytes(model, trainer) <= gpu.memory_bytes // 10
