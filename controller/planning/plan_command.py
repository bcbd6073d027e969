"""`ownloop plan`: the command, and its tables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from controller.commands.command import TakesFields
from controller.commands.recipes import configuration
from controller.planning.gpus import GIB, GPUS, Efficiency
from controller.planning.memory import (
    Memory,
    cache_bytes_per_token,
    generator_memory,
    longest_row,
    trainer_memory,
    version_bytes,
)
from controller.planning.search import Layout, check_layout, find_layouts, fits_with_versions
from controller.planning.sizes import ModelSize
from controller.planning.times import StepTime, Work, step_time
from rl.checks import check_at_least, check_known
from rl.system.hf_config import find_family, read_config
from trainer.config import LayoutConfig
from trainer.engines.titan.layout_check import parse_shape


@dataclass(frozen=True, kw_only=True)
class Plan(TakesFields):
    """Computes whether a recipe fits its GPUs, how long a step takes, and which layouts are faster."""

    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """A name that `ownloop list` shows, or a Python file's path. --field value sets a field of its configuration."""
    gpu: str = "h100"
    """The kind of GPU: h100, h200, a100 or b200."""
    model_directory: Path | None = None
    """A directory with the model's config.json, in place of the recipe's model; no weights are needed."""
    completion_tokens: int | None = None
    """Mean length of a completion. The default is the longest, `sampling.max_tokens`."""
    prompt_tokens: int = 256
    """Mean length of a prompt."""
    metrics: Path | None = None
    """A run's metrics.jsonl, whose `mfu` takes the place of the assumed efficiency of training."""
    price: float | None = None
    """Price of a GPU for an hour: the plan then has the cost of a step."""
    search: int | None = None
    """Rank the layouts on so many GPUs."""
    gpus_per_host: int = 8
    """Tensor parallelism stays within a host."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, the value and what is accepted."""
        given = {"--completion-tokens": self.completion_tokens, "--search": self.search}
        check_at_least(1, **{name: value for name, value in given.items() if value is not None})
        check_at_least(1, **{"--prompt-tokens": self.prompt_tokens, "--gpus-per-host": self.gpus_per_host})
        check_at_least(0, **{"--price": self.price or 0})

    def run(self) -> int:
        """Prints the plan. Returns 1 if the run does not fit."""
        lines, fits = planned(self, configuration(self.recipe, self.fields, "plan"))
        print("\n".join(lines))
        return 0 if fits else 1


def planned(options: Plan, config: Any) -> tuple[list[str], bool]:
    """Lines of a plan for a loop's configuration, and whether the run fits. Raises ValueError, also for the engine."""
    check_known("--gpu", options.gpu, GPUS)
    model, trainer, generator, work = _read(options, config)
    gpu, efficiency = GPUS[options.gpu], _efficiency(options.metrics)
    overlaps = hasattr(config, "max_staleness")
    if options.search is not None:
        found = find_layouts(
            model, trainer, generator, work, gpu, efficiency, num_gpus=options.search,
            gpus_per_host=options.gpus_per_host, overlaps=overlaps, generator_ranks=_proven_ranks(generator.model),
        )  # fmt: skip
        return list(_ranked(found, options)), bool(found)
    accumulates = work.num_rows(trainer) > 1
    of_trainer = trainer_memory(model, trainer, gpu, accumulates=accumulates)
    versions = version_bytes(model, trainer) if fits_with_versions(model, trainer, gpu) else 0
    on_same = versions if generator.placement == "colocated" else 0
    of_generator = generator_memory(model, generator, gpu, versions=on_same)
    time = step_time(model, trainer, generator, work, gpu, efficiency, overlaps=overlaps)
    num_gpus = Layout(trainer, generator, time).num_gpus
    cached = of_generator.parts["keys and values"] // cache_bytes_per_token(model, generator)
    lines = [
        f"{model.numel / 1e9:.2f} billion parameters on {num_gpus} x {options.gpu}; every figure is computed",
        "",
        *memory_lines(f"trainer, each of {trainer.num_ranks} ranks", of_trainer),
        f"  weights on their way {versions / GIB:.2f} GiB more, if they travel from GPU to GPU"
        if versions and not trainer.is_frozen
        else "  weights on their way go through the host's memory",
        f"  longest row that fits: {longest_row(model, trainer, gpu, accumulates=accumulates)} tokens"
        " (max_tokens_per_microbatch)",
        "",
        *memory_lines(f"generator, each of {generator.num_copies * generator.tensor_parallel} ranks", of_generator),
        f"  room for {max(0, cached)} tokens: {max(0, cached) // generator.max_model_len} sequences of"
        f" {generator.max_model_len} (max_num_seqs {generator.max_num_seqs})",
        "",
        *_time_lines(time, work, efficiency, options.price, num_gpus),
    ]
    return lines, of_trainer.fits and cached >= generator.max_model_len


def _read(options: Plan, config: Any) -> tuple[ModelSize, Any, Any, Work]:
    """Raises ValueError for a loop that does not sample, for an unknown model and for a layout that is refused."""
    from controller.runs.models import resolve_model

    missing = [name for name in ("trainer", "generator", "sampling", "prompts_per_step") if not hasattr(config, name)]
    if missing:
        raise ValueError(f"recipe {options.recipe} has no {missing[0]}; plan is for loops that sample and train")
    directory = options.model_directory or resolve_model(config.model)
    trainer = replace(config.trainer, model=directory)
    generator = replace(config.generator, model=directory)
    if options.search is None:
        check_layout(trainer)
        if generator.tensor_parallel > (most := _proven_ranks(directory) or generator.tensor_parallel):
            raise ValueError(
                f"GeneratorConfig.tensor_parallel is {generator.tensor_parallel}; for this model it is proven up to"
                f" {most}"
            )
    work = Work(
        num_prompts=config.prompts_per_step,
        group_size=getattr(config, "group_size", 1),
        prompt_tokens=options.prompt_tokens,
        completion_tokens=options.completion_tokens or config.sampling.max_tokens,
    )
    try:
        shape = parse_shape(read_config(directory))
    except ValueError as error:  # of torchtitan, whose models these are; the recipe may have another engine
        raise ValueError(f"plan knows the models that torchtitan trains, and not this one: {error}") from None
    return ModelSize(shape), trainer, generator, work


def _proven_ranks(model: Path) -> int | None:
    """The most ranks of one generator, where its family has such a limit."""
    family = find_family(read_config(model))
    return None if family is None else family.generator_ranks


def _efficiency(metrics: Path | None) -> Efficiency:
    """That of `gpus.py`, or of a run. Raises ValueError if the run's file has no `mfu`."""
    if metrics is None:
        return Efficiency()
    from statistics import median

    from controller.runs.folder import read_metrics

    reached = [row["mfu"] for row in read_metrics(metrics) if row.get("mfu")]
    if not reached:
        raise ValueError(f"--metrics {metrics} has no row with mfu; it must be the metrics.jsonl of a run that trained")
    return Efficiency(train=median(reached))


def memory_lines(title: str, memory: Memory) -> Iterator[str]:
    """The parts of a rank's memory, and whether they fit."""
    yield f"{title}:"
    for name, size in memory.parts.items():
        missing = f"; {-size / GIB:.2f} GiB are missing" if size < 0 else ""
        if size:
            yield f"  {name:<16} {max(size, 0) / GIB:8.2f} GiB{missing}"
    yield f"  {'CUDA and NCCL':<16} {memory.allowance / GIB:8.2f} GiB (an allowance)"
    total = (memory.allocated + memory.allowance) / GIB
    verdict = "fits" if memory.fits else "does not fit"
    yield f"  {'together':<16} {total:8.2f} GiB of {memory.gpu.memory_gib:.1f}: {verdict}"


def _time_lines(
    time: StepTime, work: Work, efficiency: Efficiency, price: float | None, num_gpus: int
) -> Iterator[str]:
    yield f"a step of {work.num_sequences} completions, {work.trained_tokens} tokens to train on:"
    for name, seconds in time.phases.items():
        yield f"  {name:<16} {seconds:8.2f} s"
    together = "; sampling and training overlap" if time.overlaps else ""
    yield f"  {'step':<16} {time.step:8.2f} s{together}"
    if price is not None:
        yield f"  {'cost':<16} {time.step / 3600 * price * num_gpus:8.4f}"
    yield (
        f"assumed: {efficiency.train:.0%} of the matrix rate in training, {efficiency.prefill:.0%} for prompts,"
        f" {efficiency.decode:.0%} of the memory's rate and {1e3 * efficiency.decode_overhead_s:.0f} ms for a sampled"
        f" token, {efficiency.copies:.0%} of links; for a completion {1e3 * efficiency.completion_overhead_s:.1f} ms of"
        f" a replica's processor, and {1e3 * efficiency.datum_overhead_s:.2f} ms of a trainer's"
    )


def _ranked(layouts: list[Layout], options: Plan) -> Iterator[str]:
    """The table of layouts. Says what to try if there are none."""
    if not layouts:
        yield f"no layout fits {options.search} x {options.gpu}; try more GPUs, or --trainer.moments-dtype bfloat16"
        return
    yield f"layouts on at most {options.search} x {options.gpu}, fastest first; every figure is computed:"
    yield "| GPUs | trainer | generator | seconds a step |" + (" cost |" if options.price is not None else "")
    yield "|---|---|---|---|" + ("---|" if options.price is not None else "")
    for layout in layouts:
        degrees = {
            **_degrees(layout.trainer),
            "activation_checkpointing": layout.trainer.activation_checkpointing,
        }
        trainer = ", ".join(f"{name}={value}" for name, value in degrees.items())
        sampler = f"{layout.generator.num_replicas} x tensor_parallel={layout.generator.tensor_parallel}"
        row = f"| {layout.num_gpus} | {trainer} | {sampler} | {layout.time.step:.2f} |"
        if options.price is not None:
            row += f" {layout.time.step / 3600 * options.price * layout.num_gpus:.4f} |"
        yield row


def _degrees(config: LayoutConfig) -> Mapping[str, Any]:
    names = (
        *("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"),
        *("context_parallel", "pipeline_parallel", "expert_parallel"),
    )
    return {name: getattr(config, name) for name in names if getattr(config, name) > 1}
