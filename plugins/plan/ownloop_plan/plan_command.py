"""`ownloop plan`: the command, and its tables."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from controller.commands.command import TakesFields
from controller.commands.recipes import configuration
from controller.runs.loop_config import options_of
from generator.config import GeneratorConfig
from ownloop_plan.gpus import GIB, GPUS, Efficiency
from ownloop_plan.memory import (
    Memory,
    cache_bytes_per_token,
    fits_sequences,
    generator_memory,
    host_state,
    longest_row,
    trainer_memory,
    versions_on_gpu,
)
from ownloop_plan.search import Layout, check_layout, find_layouts
from ownloop_plan.sizes import ModelSize
from ownloop_plan.times import StepTime, Work, num_gpus, step_time
from rl.checks import MAX_FLOAT32, check_at_least, check_between, check_known
from rl.system.disk import cache_directory, write_json
from rl.system.hf_config import parse_decoder_config, read_config
from trainer.config import LayoutConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Plan(TakesFields):
    """Computes whether a recipe fits its GPUs, how long a step takes, and which layouts are faster."""

    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """A name that `ownloop list` shows, or a Python file's path. --field value sets a field of its configuration."""
    gpu: str = "h100"
    """The kind of GPU: rtx4090, l40s, a100, h100, h200 or b200."""
    model_directory: Path | None = None
    """A directory with the model's config.json, in place of the recipe's model; no weights are needed."""
    completion_tokens: int | None = None
    """Mean length of a completion. The default is the longest, `sampling.max_tokens`."""
    prompt_tokens: int | None = None
    """Mean length of a prompt. The default is 256, or what a completion leaves of `generator.max_model_len`."""
    metrics: Path | None = None
    """A run's metrics.jsonl, whose `mfu` takes the place of the assumed efficiency of training."""
    price: float | None = None
    """Price of a GPU for an hour: the plan then has the cost of a step."""
    search: int | None = None
    """Rank the layouts on so many GPUs."""
    gpus_per_host: int = 8
    """Tensor parallelism stays within a host, and weights travel between hosts over the network."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the option, the value and what is accepted."""
        given = {
            "--completion-tokens": self.completion_tokens,
            "--search": self.search,
            "--prompt-tokens": self.prompt_tokens,
        }
        check_at_least(1, **{name: value for name, value in given.items() if value is not None})
        check_at_least(1, **{"--gpus-per-host": self.gpus_per_host})
        check_between(0, MAX_FLOAT32, **{"--price": self.price or 0})

    def run(self) -> int:
        """Prints the plan. Returns 1 if the run does not fit."""
        lines, fits = planned(self, configuration(self.recipe, self.fields, "plan"))
        print("\n".join(lines))
        return 0 if fits else 1


def planned(options: Plan, config: Any) -> tuple[list[str], bool]:
    """Lines of a plan for a loop's configuration, and whether the run fits. Raises ValueError, also for the engine."""
    check_known("--gpu", options.gpu, GPUS)
    model, trainer, generator, work = _read(options, config)
    gpu, efficiency, per_host = GPUS[options.gpu], _efficiency(options.metrics, trainer), options.gpus_per_host
    overlaps = hasattr(config, "max_staleness")
    if options.search is not None:
        shares = options_of(config).evaluation == "between"
        found = find_layouts(
            model, trainer, generator, work, gpu, efficiency, most_gpus=options.search, gpus_per_host=per_host,
            overlaps=overlaps, placements=("split", "colocated") if shares else ("split",),
        )  # fmt: skip
        return [*_ranked(found, options), *_not_counted(config)], bool(found)
    count, accumulates = num_gpus(trainer, generator), work.num_rows(trainer) > 1
    versions = versions_on_gpu(model, trainer, generator.weight_transport, gpu, one_host=count <= per_host)
    of_trainer = trainer_memory(model, trainer, gpu, accumulates=accumulates, versions=versions)
    longest = longest_row(model, trainer, gpu, accumulates=accumulates, versions=versions)
    on_same = versions if generator.placement == "colocated" else 0
    of_generator = generator_memory(model, generator, gpu, versions=on_same)
    time = step_time(model, trainer, generator, work, gpu, efficiency, overlaps=overlaps, gpus_per_host=per_host)
    way = "lie there" if versions else "go through memory of the host" if count <= per_host else "go over the network"
    lines = [
        f"{model.numel / 1e9:.2f} billion parameters on {count} x {options.gpu}; every figure is computed",
        *_not_counted(config),
        "",
        *memory_lines(f"trainer, each of {trainer.num_ranks} ranks", of_trainer),
        *_host_lines(model, trainer),
        *_row_lines(config.trainer, trainer),
        f"  longest row that fits: {longest} tokens (max_tokens_per_microbatch)",
        f"  weights on their way {way}",
        "",
        *_generator_lines(model, generator, of_generator),
        "",
        *_time_lines(time, work, efficiency, options.price, count),
    ]
    return lines, of_trainer.fits and fits_sequences(model, generator, of_generator)


def _read(options: Plan, config: Any) -> tuple[ModelSize, Any, Any, Work]:
    """Raises ValueError for a loop that does not sample, for an unknown model and for a layout that is refused."""
    missing = [name for name in ("trainer", "generator", "sampling", "prompts_per_step") if not hasattr(config, name)]
    if missing:
        raise ValueError(f"recipe {options.recipe} has no {missing[0]}; plan is for loops that sample and train")
    directory = options.model_directory or _directory(config.model)
    trainer, generator = (
        replace(config.policy_config, model=directory),
        replace(config.generator_config, model=directory),
    )
    settings = read_config(directory)
    if options.search is None:
        check_layout(trainer)
    try:
        shape = parse_decoder_config(settings)
    except ValueError as error:  # of torchtitan, whose models these are; the recipe may have another engine
        raise ValueError(f"plan knows the models that torchtitan trains, and not this one: {error}") from None
    if trainer.engine != "torchtitan":
        raise ValueError(
            f"TrainerConfig.engine is {trainer.engine!r}; plan knows what 'torchtitan' needs, and other engines need"
            " other memory: --trainer.engine torchtitan plans this model with it"
        )
    if options.search is None:
        generator.check_settings(settings)
    work = _work(options, config)
    longest = min(work.prompt_tokens + config.sampling.max_tokens, generator.max_model_len)
    row = max(trainer.max_tokens_per_microbatch, longest)  # a datum that is longer than a row runs alone
    return ModelSize(shape), replace(trainer, max_tokens_per_microbatch=row), generator, work


def _directory(model: str) -> Path:
    """A directory with the model's config.json. Of a model of the hub only settings are fetched."""
    from controller.runs.models import HubName, fetch, resolve_model

    if (directory := Path(model).expanduser()).is_dir():
        return directory
    if (size := model.removeprefix("Qwen/").removeprefix("Qwen3-")) in _QWEN3:
        return _written(size)
    on_hub = HubName.parse(model)
    return resolve_model(model) if on_hub is None else fetch(on_hub, weights=False)


_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12288, 36, 32),
    "14B": (5120, 17408, 40, 40),
    "32B": (5120, 25600, 64, 64),
}
"""Width, width of the feed-forward part, layers and heads of attention of Qwen3's dense models, which recipes name:
table 1 of https://arxiv.org/abs/2505.09388, and their config.json."""


def _written(size: str) -> Path:
    """A directory with the config.json of a model of Qwen3, which needs no network."""
    width, inner, layers, heads = _QWEN3[size]
    folder = cache_directory() / "shapes" / f"Qwen3-{size}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": size in ("0.6B", "1.7B", "4B"),
    }
    write_json(folder / "config.json", settings)
    return folder


def _work(options: Plan, config: Any) -> Work:
    """What a step samples. Raises ValueError if prompt and completion exceed the context."""
    room, completion = config.generator.max_model_len, options.completion_tokens or config.sampling.max_tokens
    prompt = options.prompt_tokens or max(1, min(256, room - completion))
    if prompt + completion > room:
        raise ValueError(
            f"--prompt-tokens is {prompt} and --completion-tokens {completion}; together they may be at most"
            f" GeneratorConfig.max_model_len, which is {room}"
        )
    sampled = config.prompts_per_step * (group := options_of(config).group_size) * completion
    wanted = options_of(config).tokens_per_step  # for which a step of `accumulate` samples up to 16 batches
    batches = min(16, max(1, math.ceil(wanted / sampled)))
    return Work(
        num_prompts=batches * config.prompts_per_step,
        group_size=group,
        prompt_tokens=prompt,
        completion_tokens=completion,
    )


def _not_counted(config: object) -> list[str]:
    """A line for a loop that has further models."""
    further = {"critic": "a critic and a reference", "teacher_trainer": "teachers"}
    names = [words for name, words in further.items() if hasattr(config, name)]
    return [f"not counted: {names[0]}, which this loop has on GPUs of their own or in turns"] if names else []


def _row_lines(stated: TrainerConfig, trainer: TrainerConfig) -> list[str]:
    """A line if a row is longer than the recipe says."""
    row, limit = trainer.max_tokens_per_microbatch, stated.max_tokens_per_microbatch
    return [f"  for a row of {row} tokens: one datum may be longer than {limit}, and then runs alone"] * (row > limit)


def _generator_lines(model: ModelSize, config: GeneratorConfig, memory: Memory) -> Iterator[str]:
    yield from memory_lines(f"generator, each of {config.num_copies * config.tensor_parallel} ranks", memory)
    cached = max(0, memory.parts["keys and values"]) // max(1, cache_bytes_per_token(model, config))
    yield (
        f"  room for {cached} tokens: {cached // config.max_model_len} sequences of {config.max_model_len}"
        f" (max_num_seqs {config.max_num_seqs or memory.gpu.num_seqs})"
    )
    if memory.fits and not fits_sequences(model, config, memory):
        yield "  does not fit: vLLM wants room for one sequence of max_model_len"


def _efficiency(metrics: Path | None, trainer: TrainerConfig) -> Efficiency:
    """That of `gpus.py`, or of a run. Raises ValueError if the run's file has no `mfu`.

    `mfu` leaves out what is computed twice, and times do not. Where the run's config.json is not there, it is taken to
    have been checkpointed as this trainer.
    """
    if metrics is None:
        return Efficiency()
    if not metrics.is_file():
        raise ValueError(f"--metrics is {metrics}, which is no file; it must be the metrics.jsonl of a run")
    from statistics import median

    from controller.runs.folder import CONFIG_FILE, read_json, read_metrics

    reached = [row["mfu"] for row in read_metrics(metrics) if row.get("mfu")]
    if not reached:
        raise ValueError(f"--metrics {metrics} has no row with mfu; it must be the metrics.jsonl of a run that trained")
    checkpointing, passes = trainer.activation_checkpointing, 2 if trainer.is_frozen else 3
    if (file := metrics.with_name(CONFIG_FILE)).is_file():
        of_run = read_json(file).get("trainer")
        if not isinstance(of_run, dict):
            raise ValueError(
                f"{file} is not a run's: it has no settings of a trainer; --metrics must be in a run's folder"
            )
        checkpointing, passes = of_run.get("activation_checkpointing"), 2 if of_run.get("lora") else 3
    return Efficiency(train=median(reached) * (passes + (checkpointing == "full")) / passes)


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


def _host_lines(model: ModelSize, trainer: TrainerConfig) -> Iterator[str]:
    """What a trainer that takes turns keeps in the hosts' memory: all moments, and its parameters while it sleeps."""
    if trainer.placement == "colocated":
        kept = sum(sum(host_state(model, trainer, stage).values()) for stage in model.stages(trainer))
        ranks = trainer.num_ranks // trainer.pipeline_parallel
        yield f"  memory of the hosts, of all ranks: {kept * ranks / GIB:.2f} GiB for parameters and moments"


def _time_lines(time: StepTime, work: Work, efficiency: Efficiency, price: float | None, count: int) -> Iterator[str]:
    yield f"a step of {work.num_sequences} completions, {work.trained_tokens} tokens to train on:"
    for name, seconds in time.phases.items():
        yield f"  {name:<16} {seconds:8.2f} s"
    together = "; sampling and training overlap" if time.overlaps else ""
    yield f"  {'step':<16} {time.step:8.2f} s{together}"
    if price is not None:
        yield f"  {'cost':<16} {time.step / 3600 * price * count:8.4f}"
    yield f"assumed: {efficiency.train:.0%} of the matrix rate in training, {efficiency.prefill:.0%} for prompts,"
    yield (
        f"  {efficiency.decode:.0%} of the memory's rate and {1e3 * efficiency.decode_overhead_s:.0f} ms for a sampled"
        f" token, {efficiency.copies:.0%} of links;"
    )
    yield (
        f"  for a completion {1e3 * efficiency.completion_overhead_s:.1f} ms of a replica's processor, and"
        f" {1e3 * efficiency.datum_overhead_s:.2f} ms of a trainer's"
    )


def _ranked(layouts: list[Layout], options: Plan) -> Iterator[str]:
    """The table of layouts. Says what to try if there are none."""
    if not layouts:
        yield f"no layout fits {options.search} x {options.gpu}; try more GPUs, or --trainer.moments-dtype bfloat16"
        return
    yield f"layouts on at most {options.search} x {options.gpu}, fastest first; every figure is computed:"
    yield "| GPUs | placement | trainer | generator | seconds a step |" + (
        " cost |" if options.price is not None else ""
    )
    yield "|---|---|---|---|---|" + ("---|" if options.price is not None else "")
    for layout in layouts:
        degrees = {
            **_degrees(layout.trainer),
            "activation_checkpointing": layout.trainer.activation_checkpointing,
        }
        trainer = ", ".join(f"{name}={value}" for name, value in degrees.items())
        sampler = f"{layout.generator.num_replicas} x tensor_parallel={layout.generator.tensor_parallel}"
        row = f"| {layout.num_gpus} | {layout.trainer.placement} | {trainer} | {sampler} | {layout.time.step:.2f} |"
        if options.price is not None:
            row += f" {layout.time.step / 3600 * options.price * layout.num_gpus:.4f} |"
        yield row


def _degrees(config: LayoutConfig) -> Mapping[str, object]:
    names = (
        *("data_parallel_replicate", "data_parallel_shard", "tensor_parallel"),
        *("context_parallel", "pipeline_parallel", "expert_parallel"),
    )
    return {name: getattr(config, name) for name in names if getattr(config, name) > 1}
