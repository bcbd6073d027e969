"""Whole runs in `ownloop plan`: pipelines, adapters, colocation and refusals, against torchtitan, engines and hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    _ComputationType,  # pyright: ignore[reportPrivateUsage]
)

from controller.commands.command_line import run_command
from generator.config import GeneratorConfig, LoRALimits
from ownloop_families.tiny import TINY_FAMILIES
from ownloop_plan.gpus import GIB, GPUS, Efficiency
from ownloop_plan.memory import fits_sequences, generator_memory, trainer_memory
from ownloop_plan.plan_command import Plan, planned
from ownloop_plan.search import find_layouts
from ownloop_plan.times import Work, generate_seconds, step_time
from plugins.plan.tests.planned_models import size_of, write_qwen3
from rl.lora import LoRAConfig
from rl.tiny_models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from trainer.config import TrainerConfig
from trainer.engines import load_engine

H100 = GPUS["h100"]
WORK = Work(num_prompts=32, group_size=8, prompt_tokens=256, completion_tokens=1024)
RECIPE = "grpo_qwen3_gpu"
FULL = ("--trainer.activation-checkpointing", "full")


def plan(folder: Path, *words: str, recipe: str = RECIPE) -> int:
    return run_command(["plan", recipe, "--model-directory", str(folder), *words])


def seconds(said: str, phase: str) -> float:
    found = re.search(rf"^  {phase} +([\d.]+) s", said, re.MULTILINE)
    assert found is not None, said
    return float(found[1])


@pytest.mark.seconds
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_stages_are_torchtitans(tmp_path: Path, ranks: int, schedule: Any) -> None:
    from torchtitan.distributed.pipeline_parallel import (
        _generate_llm_fqn_per_model_part,  # pyright: ignore[reportPrivateUsage]
    )

    size = size_of(write_qwen3(tmp_path / "model", "32B"))
    config = TrainerConfig(pipeline_parallel=ranks, pipeline_schedule=schedule)
    parts = _generate_llm_fqn_per_model_part(config.num_stages, size.decoder.num_layers)
    theirs: set[tuple[int, bool, bool]] = set()
    for rank in range(ranks):
        names = [name for part in parts[rank::ranks] for name in part]
        layers = sum(name.startswith("layers.") for name in names)
        theirs.add((layers, "tok_embeddings" in names, "lm_head" in names))
    assert {(len(stage.kinds), stage.embeds, stage.projects) for stage in size.stages(config)} == theirs
    of_layer = sum(each.numel for each in size.layers[1][1])
    largest = max(n * of_layer + (e + p) * size.embedding.numel + p * size.decoder.dim for n, e, p in theirs)
    assert size.of_rank(config) == largest


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_an_interleaved_rank_keeps_rows_as_torch_does(tmp_path: Path, ranks: int) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "32B"))
    (first, *_) = size.stages(TrainerConfig(pipeline_parallel=ranks, pipeline_schedule="Interleaved1F1B"))
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)  # its constructor wants processes
    vars(schedule).update(n_local_stages=2, pp_group_size=ranks, microbatches_per_round=ranks)
    vars(schedule).update(_n_microbatches=4 * ranks, number_of_rounds=4)
    kept = most = 0
    for action in schedule._calculate_single_rank_operations(0):  # pyright: ignore[reportPrivateUsage]
        if action is not None:
            kind = action.computation_type
            kept += (kind == _ComputationType.FORWARD) - (kind == _ComputationType.FULL_BACKWARD)
            most = max(most, kept)
    assert first.rows == -(-most // 2)  # a row in one of two stages is half a row


def test_each_rank_of_a_pipeline_has_what_is_its_own(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "32B"))
    whole = trainer_memory(size, TrainerConfig(data_parallel_shard=16), H100, tokens=1024)
    piped = trainer_memory(size, TrainerConfig(data_parallel_shard=2, pipeline_parallel=8), H100, tokens=1024)
    # 64 layers and two embeddings on 8 ranks: the first has 8 layers and an embedding, which torch shards over 2.
    of_layer = sum(each.numel for each in size.layers[1][1])
    assert piped.parts["parameters"] == 4 * (8 * of_layer + size.embedding.numel) // 2
    assert piped.parts["parameters"] > 1.05 * whole.parts["parameters"]


CONFIGS = {
    "all": LoRAConfig(rank=4),
    "attention": LoRAConfig(rank=16, train_mlp=False, train_unembed=False),
    "network": LoRAConfig(rank=8, train_attn=False),
}


@pytest.mark.seconds
@pytest.mark.parametrize("lora", CONFIGS)
@pytest.mark.parametrize(
    "make",
    [tiny_llama, lambda path: tiny_qwen3(path, tied=False), tiny_qwen3_moe]
    + [TINY_FAMILIES[name][1] for name in ("gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_5", "qwen3_5_moe")],
)
def test_adapters_are_the_engines(tmp_path: Path, make: Any, lora: str) -> None:
    folder, config = make(tmp_path / "model"), CONFIGS[lora]
    engine = load_engine(TrainerConfig(model=folder, compute_dtype="float32", lora=config))
    counted = sum(parameter.numel() for _, parameter in engine.adapter("a", config).hf_parameters())
    assert size_of(folder).adapter(config) == counted


def test_a_generator_has_room_for_adapters(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "8B"))
    config = GeneratorConfig(lora=LoRALimits(max_rank=24, max_adapters=3))
    # Inputs and outputs of q, k, v, o, gate, up and down in 36 layers, and of the output projection.
    layer = (4096 + 4096) + 2 * (4096 + 1024) + (4096 + 4096) + 3 * (4096 + 12288)
    assert generator_memory(size, config, H100).parts["adapters"] == 3 * 32 * (36 * layer + 151936 + 4096) * 2


def test_a_head_in_float32_is_counted(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "8B"))
    plain, wide = (
        trainer_memory(size, TrainerConfig(data_parallel_shard=8, head_dtype=dtype), H100, tokens=16384)
        for dtype in (None, "float32")
    )
    weight = 151936 * 4096
    assert wide.allocated - plain.allocated >= 4 * weight  # the copy of the projection alone


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_weights_travel_as_they_will(tmp_path: Path, transport: Any) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    size, efficiency = size_of(folder), Efficiency()
    options: dict[str, Any] = {"model": folder, "placement": "colocated"}
    trainer = TrainerConfig(data_parallel_shard=8, **options)
    generator = GeneratorConfig(num_replicas=8, weight_transport=transport, **options)
    phases = step_time(size, trainer, generator, WORK, H100, efficiency, overlaps=True)
    assert not phases.overlaps  # they take turns
    # 16.4 GB in bfloat16, over NVLink or PCIe. In turns, parameters go there and back, and moments both ways at once.
    link = 400e9 if transport == "auto" else 50e9
    pull, push = 2 * 8.19e9 / (0.6 * link), 6 * 8.19e9 / 8 / 3.35e12
    push += 0 if transport == "auto" else 2 * 8.19e9 / 8 / (0.6 * 50e9)
    assert phases.phases["pull"] == pytest.approx(pull + 0.015, rel=0.01)
    assert phases.phases["push"] == pytest.approx(push + 0.015, rel=0.01)
    assert phases.phases["turns"] == pytest.approx((2 * 4 + 8) * 8.19e9 / 8 / (0.6 * 50e9), rel=0.01)
    frozen = TrainerConfig(lora=LoRAConfig(), **options)
    turns = step_time(size, frozen, generator, WORK, H100, efficiency).phases["turns"]
    assert turns == pytest.approx(2 * 2 * 8.19e9 / (0.6 * 50e9), rel=0.01)  # bfloat16, there and back


def test_moments_of_a_colocated_trainer_are_on_the_host(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "8B"))
    split = TrainerConfig(data_parallel_shard=8, activation_checkpointing="full")
    shared = TrainerConfig(data_parallel_shard=8, activation_checkpointing="full", placement="colocated")
    at_rest, in_turns = (trainer_memory(size, config, H100) for config in (split, shared))
    assert at_rest.allocated - in_turns.allocated == pytest.approx(8 * 8.19e9 / 8, abs=0.8 * GIB)
    assert in_turns.allowance == at_rest.allowance + H100.context_bytes  # the generator's


@pytest.mark.seconds
def test_a_datum_longer_than_a_row_needs_its_own_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    sharded = ("--trainer.data-parallel-shard", "8", "--generator.max-model-len", "40960")
    long = ("--sampling.max-tokens", "40000", "--trainer.max-tokens-per-microbatch", "4096")
    assert plan(folder, *sharded, *FULL, "--trainer.max-tokens-per-microbatch", "40256") == 0
    whole = re.findall(r"together .*", capsys.readouterr().out)
    assert plan(folder, *sharded, *FULL, *long) == 0
    said = capsys.readouterr().out
    assert "for a row of 40256 tokens: one datum may be longer than 4096, and then runs alone" in said
    assert re.findall(r"together .*", said) == whole
    assert plan(folder, *sharded, *long, "--trainer.activation-checkpointing", "none") == 1


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--generator.tensor-parallel", "3"], "GeneratorConfig.tensor_parallel is 3; this model has 32 attention"),
        (["--generator.max-model-len", "99999"], "GeneratorConfig.max_model_len is 99999; this model's context is"),
        (["--trainer.engine", "fsdp2", "--trainer.activation-checkpointing", "full", "--trainer.no-compile"],
         "TrainerConfig.engine is 'fsdp2'; plan knows what 'torchtitan' needs"),
        (["--prompt-tokens", "3000"], "--prompt-tokens is 3000 and --completion-tokens 2048; together they may be at"
         " most GeneratorConfig.max_model_len, which is 4096"),
        (["--price", "inf"], "--price is inf; it must be in"),
        (["--metrics", "missing.jsonl"], "--metrics is missing.jsonl, which is no file"),
    ],
)  # fmt: skip
def test_what_would_not_start_is_refused(
    tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(write_qwen3(tmp_path / "model", "8B"), *words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.seconds
def test_a_short_context_leaves_less_to_prompts(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(smollm2, recipe="grpo_smollm2_cpu") == 0
    assert "every figure is computed" in capsys.readouterr().out


@pytest.mark.seconds
def test_further_models_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    for words in ((), ("--search", "16")):
        plan(folder, *words, recipe="ppo_qwen3_gpu")
        assert "not counted: a critic and a reference" in capsys.readouterr().out
    plan(folder)
    assert "not counted" not in capsys.readouterr().out


@pytest.mark.seconds
def test_a_runs_efficiency_is_without_what_was_computed_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, metrics = write_qwen3(tmp_path / "model", "8B"), tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "mfu": 0.25, "schema_version": 4}) + "\n")
    taken: list[float] = []
    for run in (None, "none", "full"):
        if run is not None:
            config = {"trainer": {"activation_checkpointing": run, "lora": None}}
            (tmp_path / "config.json").write_text(json.dumps(config))
        plan(folder, *FULL, "--trainer.data-parallel-shard", "8", "--metrics", str(metrics))
        taken.append(seconds(capsys.readouterr().out, "train"))
    assert taken[0] == taken[2] == pytest.approx(taken[1] * 3 / 4, rel=0.01)
    for other in ({"model_type": "llama"}, {"trainer": None}):
        (tmp_path / "config.json").write_text(json.dumps(other))
        assert plan(folder, *FULL, "--metrics", str(metrics)) == 2
        assert "config.json is not a run's: it has no settings of a trainer" in capsys.readouterr().err


def test_vllm_needs_room_for_one_sequence(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model", "32B")
    size = size_of(folder)
    config = GeneratorConfig(model=folder, max_model_len=40960, max_num_seqs=256)
    memory = generator_memory(size, config, H100)
    assert 0 < memory.parts["keys and values"] < 40960 * 64 * 2 * 8 * 128 * 2
    assert memory.fits
    assert not fits_sequences(size, config, memory)
    trainer = TrainerConfig(model=folder, data_parallel_shard=8)
    options: dict[str, Any] = {"most_gpus": 16, "gpus_per_host": 8, "overlaps": False}
    found = find_layouts(size, trainer, config, WORK, H100, Efficiency(), **options)
    assert found
    assert all(each.generator.tensor_parallel > 1 for each in found)


def test_vllms_share_of_a_gpu_does_not_fragment(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    for share, fits in ((0.97, True), (1.01, False)):
        config = GeneratorConfig(model=folder, engine_args={"gpu_memory_utilization": share})
        assert generator_memory(size_of(folder), config, H100).fits is fits


@pytest.mark.seconds
@pytest.mark.parametrize("placement", ["split", "colocated"])
@pytest.mark.parametrize("most_gpus", [6, 8, 16])
def test_found_layouts_fit_when_planned(tmp_path: Path, most_gpus: int, placement: Any) -> None:
    from dataclasses import replace

    from controller.commands.recipes import configuration

    folder = write_qwen3(tmp_path / "model", "8B")
    fields = ["--placement", placement, "--generator.max-model-len", "32768", "--generator.tensor-parallel", "1"]
    config = configuration(RECIPE, fields, "plan")
    size = size_of(folder)
    trainer, generator = replace(config.trainer, model=folder), replace(config.generator, model=folder)
    options: dict[str, Any] = {"most_gpus": most_gpus, "gpus_per_host": 8, "overlaps": False}
    work = Work(num_prompts=32, group_size=8, prompt_tokens=256, completion_tokens=2048)
    found = find_layouts(size, trainer, generator, work, H100, Efficiency(), **options)
    assert found
    for layout in found:
        assert layout.num_gpus <= most_gpus
        placed = layout.trainer.placement
        one = replace(config, trainer=layout.trainer, generator=layout.generator, placement=placed)
        lines, fits = planned(Plan(recipe=RECIPE, model_directory=folder), one)
        assert fits, "\n".join(lines)


@pytest.mark.stranger("2.F4")
def test_a_search_compares_placements(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model", "4B")
    trainer, generator = TrainerConfig(model=folder), GeneratorConfig(model=folder, max_model_len=4096)
    work = Work(num_prompts=32, group_size=8, prompt_tokens=256, completion_tokens=1024)
    options: dict[str, Any] = {"gpus_per_host": 8, "overlaps": False}
    given = size_of(folder), trainer, generator, work, H100, Efficiency()
    one = find_layouts(*given, most_gpus=1, **options)
    assert {layout.trainer.placement for layout in one} == {"colocated"}
    assert find_layouts(*given, most_gpus=1, placements=("split",), **options) == []
    best = find_layouts(*given, most_gpus=8, **options)[0].time.step
    each = [
        find_layouts(*given, most_gpus=8, placements=(name,), **options)[0].time.step for name in ("split", "colocated")
    ]
    assert best == min(each)


@pytest.mark.stranger("2.F4")
def test_a_small_model_gains_nothing_from_more_tensor_parallelism(smollm2: Path) -> None:
    work = Work(num_prompts=8, group_size=8, prompt_tokens=64, completion_tokens=64)
    took = [
        generate_seconds(size_of(smollm2), GeneratorConfig(tensor_parallel=ranks), work, H100, Efficiency())
        for ranks in (1, 2, 4, 8)
    ]
    assert min(took) == took[0]


@pytest.mark.stranger("2.F4")
def test_a_published_shape_needs_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    said: list[str] = []
    for model in ("Qwen/Qwen3-8B", str(folder)):
        run_command(["plan", RECIPE, "--model", model])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "8.19 billion parameters" in said[0]


@pytest.mark.stranger("2.F4")
def test_a_trainer_that_takes_turns_keeps_its_state_in_the_hosts_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(["plan", RECIPE, "--model", "Qwen/Qwen3-4B", "--placement", "colocated"])
    (stated,) = re.findall(r"memory of the hosts, of all ranks: ([0-9.]+) GiB", capsys.readouterr().out)
    assert float(stated) == pytest.approx(12 * 4.02e9 / 2**30, rel=0.01)  # parameters and two moments in float32
