"""Layouts on N GPUs, ranked by the time of a step: every layout that the engine accepts and that fits is compared."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name

from generator.config import GeneratorConfig
from ownloop_plan.gpus import GPU, Efficiency
from ownloop_plan.memory import fits_sequences, generator_memory, trainer_memory, versions_on_gpu
from ownloop_plan.sizes import ModelSize
from ownloop_plan.times import StepTime, Work, num_gpus, step_time, train_seconds
from rl.system.hf_config import read_config
from rl.types import Placement
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
        """GPUs of trainer and generator."""
        return num_gpus(self.trainer, self.generator)


def find_layouts(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency,
    *, most_gpus: int, gpus_per_host: int, overlaps: bool, most: int = 10,
    placements: Sequence[Placement] = ("split", "colocated"),
) -> list[Layout]:  # fmt: skip
    """The fastest layouts on at most `most_gpus` GPUs. Tensor parallelism stays within a host.

    Raises ValueError if no replica of the generator fits a host, or is accepted.
    """
    found, refused = list[Layout](), list[ValueError]()
    for placement in placements:
        try:
            found += _placed_layouts(
                model, replace(trainer, placement=placement), replace(generator, placement=placement), work, gpu,
                efficiency, most_gpus, gpus_per_host, overlaps=overlaps,
            )  # fmt: skip
        except ValueError as error:
            refused.append(error)
    if len(refused) == len(placements):
        raise refused[0]
    return sorted(found, key=lambda layout: (layout.time.step, layout.num_gpus))[:most]


def _placed_layouts(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency,
    most_gpus: int, gpus_per_host: int, *, overlaps: bool,
) -> list[Layout]:  # fmt: skip
    """Every layout that fits where both have GPUs of their own, or where they share them."""
    samplers = list(_samplers(model, generator, gpu, most_gpus, gpus_per_host))
    if not samplers:
        ranks = max(each.tensor_parallel for each in _accepted_samplers(generator, gpus_per_host))
        limit = "stays within a host" if 2 * ranks > gpus_per_host else "has no more ranks for this model"
        raise ValueError(
            f"a generator's replica {limit}: {ranks} GPUs of {gpu.memory_gib:.0f} GiB do not hold"
            f" {2 * model.numel / 1e9:.0f} GB of weights and keys and values of GeneratorConfig.max_model_len"
            f" {generator.max_model_len}; a smaller model, a shorter context or larger GPUs would do"
        )
    trainers = _best_trainers(model, trainer, generator, work, gpu, efficiency, most_gpus, gpus_per_host)
    found: list[Layout] = []
    for sampler in samplers:
        for candidate in trainers.values():
            if (taken := num_gpus(candidate, sampler)) > most_gpus:
                continue
            versions = _versions(model, candidate, sampler, gpu, one_host=taken <= gpus_per_host)
            accumulates = work.num_rows(candidate) > 1
            if not trainer_memory(model, candidate, gpu, accumulates=accumulates, versions=versions).fits:
                continue
            time = step_time(
                model, candidate, sampler, work, gpu, efficiency, overlaps=overlaps, gpus_per_host=gpus_per_host
            )
            found.append(Layout(candidate, sampler, time))
    return found


def _best_trainers(
    model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, work: Work, gpu: GPU, efficiency: Efficiency,
    most_gpus: int, per_host: int,
) -> dict[int, TrainerConfig]:  # fmt: skip
    """For each number of ranks, the fastest trainer that fits and that the engine accepts."""
    best: dict[int, tuple[float, TrainerConfig]] = {}
    least = model.numel * (2 if trainer.is_frozen else 12) // gpu.memory_bytes  # ranks that share the model
    if trainer.placement == "colocated":
        least //= 2  # moments are on the host
    for candidate in _trainers(trainer, model, (least, most_gpus), per_host):
        accumulates = work.num_rows(candidate) > 1
        versions = _versions(model, candidate, generator, gpu, one_host=most_gpus <= per_host)
        if not trainer_memory(model, candidate, gpu, accumulates=accumulates, versions=versions).fits:
            continue
        seconds = _seconds(model, candidate, work, gpu, efficiency)
        known = best.get(candidate.num_ranks)
        if (known is None or seconds < known[0]) and _is_accepted(candidate):
            best[candidate.num_ranks] = (seconds, candidate)
    return {num_ranks: candidate for num_ranks, (_, candidate) in best.items()}


def _versions(model: ModelSize, trainer: TrainerConfig, generator: GeneratorConfig, gpu: GPU, *, one_host: bool) -> int:
    return versions_on_gpu(model, trainer, generator.weight_transport, gpu, one_host=one_host)


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
    least, most_gpus = num_ranks
    experts = 1 if model.decoder.moe is None else model.decoder.moe.num_experts
    powers = _powers(most_gpus)
    for tensor, pipeline, context, expert, shard, replicate in itertools.product(
        [n for n in powers if n <= per_host],
        [n for n in powers if n <= min(16, model.decoder.num_layers)],
        [n for n in powers if n <= 8],
        [n for n in powers if n <= min(64, experts)],
        powers,
        [n for n in powers if n <= 16],
    ):
        sharing = tensor * pipeline * context * shard
        if not least <= sharing <= most_gpus // replicate or shard * context * tensor % expert:
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


def _powers(most: int) -> list[int]:
    """Powers of two."""
    return [1 << i for i in range(most.bit_length())]


def _samplers(
    model: ModelSize, config: GeneratorConfig, gpu: GPU, most_gpus: int, per_host: int
) -> Iterator[GeneratorConfig]:
    """Numbers of replicas, and of ranks of each, with which the generator starts."""
    for candidate in _accepted_samplers(config, per_host):
        if not fits_sequences(model, candidate, generator_memory(model, candidate, gpu)):
            continue
        replicas = 1
        while (replicas + config.evaluator) * candidate.tensor_parallel <= most_gpus:
            yield replace(candidate, num_replicas=replicas)
            replicas *= 2


def _accepted_samplers(config: GeneratorConfig, per_host: int) -> Iterator[GeneratorConfig]:
    """One replica, on all numbers of ranks that are accepted for the model. Raises ValueError for its other fields."""
    settings = read_config(config.model)
    single = replace(config, tensor_parallel=1, num_replicas=1, gpus=None)
    single.check_settings(settings)
    for ranks in _powers(per_host):
        candidate = replace(single, tensor_parallel=ranks)
        with contextlib.suppress(ValueError):
            candidate.check_settings(settings)
            yield candidate
