"""`ownloop plan`: parameters against transformers, memory against torch's own allocator, refusals, ranked layouts."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedConfig

from controller.commands.command_line import run_command
from generator.config import GeneratorConfig
from ownloop_families.tiny import TINY_FAMILIES
from ownloop_plan.gpus import GPUS, Efficiency
from ownloop_plan.memory import cache_bytes_per_token, generator_memory, longest_row, trainer_memory
from ownloop_plan.plan_command import memory_lines
from ownloop_plan.search import find_layouts
from ownloop_plan.times import Work, operations, step_time
from plugins.plan.tests.planned_models import QWEN3, size_of, write_qwen3, write_qwen3_5
from rl.data.packing import ModelFlops, pack_row
from rl.lora import LoRAConfig
from rl.system.decoders import DENSE
from rl.tiny_models import SERVABLE, random_batch, tiny_dense, tiny_qwen3, tiny_qwen3_moe
from tests.architectures import MODELS
from trainer.config import TrainerConfig

H100 = GPUS["h100"]
MEASURED = (
    ("0.6B", 8192, {"activation_checkpointing": "full"}, 11_400_350_208),
    ("0.6B", 8192, {"activation_checkpointing": "none"}, 22_948_004_352),
    ("0.6B", 8192, {"data_parallel_shard": 2, "activation_checkpointing": "selective"}, 11_215_588_352),
    ("8B", 4096, {"data_parallel_shard": 8, "activation_checkpointing": "full"}, 21_494_214_144),
    ("8B", 16384, {"data_parallel_shard": 8, "activation_checkpointing": "full"}, 25_419_673_088),
    ("8B", 16384, {"data_parallel_shard": 8, "activation_checkpointing": "selective"}, 55_694_177_792),
    ("8B", 32768, {"data_parallel_shard": 8, "activation_checkpointing": "full"}, 32_621_231_104),
)
"""Peaks of torch's CUDA allocator, which `python -m tests.gpu_pretended.memory` prints as `second`."""
ACCUMULATED = (
    ("0.6B", 8192, {"activation_checkpointing": "full"}, 13_785_074_176),
    ("0.6B", 8192, {"activation_checkpointing": "none"}, 25_332_728_320),
    ("8B", 16384, {"data_parallel_shard": 8, "activation_checkpointing": "full"}, 29_513_481_728),
)
"""Those of a step's later rows, which it prints as `accumulated`."""
MEASURED_QWEN3_5 = (
    ("dense", 8192, {"activation_checkpointing": "none"}, 53_359_937_536),
    ("dense", 16384, {"data_parallel_shard": 2, "activation_checkpointing": "full"}, 23_362_019_328),
    ("dense", 32768, {"data_parallel_shard": 8, "activation_checkpointing": "full"}, 16_872_149_504),
    ("dense", 32768, {"data_parallel_shard": 8, "activation_checkpointing": "selective"}, 24_676_472_832),
    ("mixture", 8192, {"activation_checkpointing": "none"}, 43_440_134_144),
)
"""Of models with these sizes of Qwen3.5's, by fla's kernels."""


TENSOR_AND_EXPERTS = TrainerConfig(tensor_parallel=2, expert_parallel=2)
DENSE_MODELS = [partial(tiny_dense, row.name, **SERVABLE) for row in DENSE if row.built_as]
FAMILIES = [TINY_FAMILIES[name][1] for name in ("gpt_oss", "glm4_moe", "deepseek_v3")]
HYBRIDS = [TINY_FAMILIES[name][1] for name in ("qwen3_5", "qwen3_5_moe")]


@pytest.mark.parametrize("make", [*DENSE_MODELS, tiny_qwen3_moe, *FAMILIES, *HYBRIDS])
def test_parameters_are_those_of_transformers(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert size_of(folder).numel == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("size", "tokens", "options", "peak", "accumulates"),
    [*((*each, False) for each in (*MEASURED, *MEASURED_QWEN3_5)), *((*each, True) for each in ACCUMULATED)],
)
def test_memory_is_what_torchs_allocator_counts(
    tmp_path: Path, size: str, tokens: int, options: dict[str, Any], peak: int, accumulates: bool
) -> None:
    folder = (write_qwen3 if size in QWEN3 else write_qwen3_5)(tmp_path / "model", size)
    config = TrainerConfig(model=folder, max_tokens_per_microbatch=tokens, **options)
    planned = trainer_memory(size_of(folder), config, H100, accumulates=accumulates)
    assert planned.allocated == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("config", "billions", "active", "cached"),
    [
        # https://arxiv.org/abs/2412.19437, section 4.2: 671 billion parameters, 37 of them for a token.
        (DeepseekV3Config(vocab_size=129280), 671.0, 37.5, 61 * (512 + 64) * 2),
        # https://arxiv.org/abs/2508.10925, table 1: 116.83 and 5.13 billion; every second layer has a window of 128.
        (GptOssConfig(num_hidden_layers=36, num_local_experts=128), 116.8, 5.7, (18 + 18 / 16) * 2 * 8 * 64 * 2),
    ],
)
def test_large_models_are_as_published(
    tmp_path: Path, config: PreTrainedConfig, billions: float, active: float, cached: float
) -> None:
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    size = size_of(tmp_path)
    assert size.numel / 1e9 == pytest.approx(billions, abs=0.1)
    embeddings = size.num_embeddings * size.embedding.numel
    assert (size.active + embeddings) / 1e9 == pytest.approx(active, abs=0.1)
    assert cache_bytes_per_token(size, GeneratorConfig(tensor_parallel=1, max_model_len=2048)) == cached


@pytest.mark.parametrize("make", [tiny_qwen3_moe, *FAMILIES])
def test_ranks_hold_everything_between_them(tmp_path: Path, make: Any) -> None:
    size = size_of(make(tmp_path / "model"))
    whole = sum(count * each.numel for count, layer in size.layers for each in layer if each.kind == "whole")
    for config, twice in ((TrainerConfig(data_parallel_shard=2), 0), (TENSOR_AND_EXPERTS, whole)):
        assert size.numel <= size.of_rank(config) * config.num_ranks <= 1.05 * size.numel + twice


def test_delta_rules_keep_a_state_of_each_sequence(tmp_path: Path) -> None:
    size = size_of(write_qwen3_5(tmp_path, "dense"))
    config = GeneratorConfig(tensor_parallel=1, max_num_seqs=100)
    assert cache_bytes_per_token(size, config) == 2 * 2 * 4 * 256 * 2  # of the two layers with attention
    # The shapes of vLLM's MambaStateShapeCalculator.gated_delta_net_state_shape; the state is in float32.
    of_layer = 32 * 128 * 128 * 4 + (32 * 128 + 2 * 16 * 128) * 3 * 2
    assert generator_memory(size, config, H100).parts["states"] == 100 * 6 * of_layer


def test_operations_are_those_of_the_metric(tmp_path: Path) -> None:
    folder = tiny_qwen3(tmp_path / "model")
    row = pack_row(random_batch((40,)), share_prefixes=False)
    work = Work(num_prompts=1, group_size=1, prompt_tokens=0, completion_tokens=40)
    counted = ModelFlops.of(folder).training(row)
    assert operations(size_of(folder), TrainerConfig(), work) == pytest.approx(counted, rel=0.05)


def test_adapters_and_long_rows(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "8B"))
    full = TrainerConfig(data_parallel_shard=8, activation_checkpointing="full")
    lora = TrainerConfig(lora=LoRAConfig(rank=32), activation_checkpointing="full")
    assert not trainer_memory(size, TrainerConfig(), H100).fits
    assert trainer_memory(size, lora, H100).parts["parameters"] == 2 * size.numel
    row = longest_row(size, full, H100)
    assert trainer_memory(size, full, H100, tokens=row).fits
    assert not trainer_memory(size, full, H100, tokens=row + 1024).fits
    assert longest_row(size, TrainerConfig(), H100) == 0


def test_layouts_are_ranked_and_fit(tmp_path: Path) -> None:
    folder = write_qwen3(tmp_path / "model", "8B")
    work = Work(num_prompts=32, group_size=8, prompt_tokens=256, completion_tokens=1024)
    options: dict[str, Any] = {"most_gpus": 16, "gpus_per_host": 8, "overlaps": False}
    trainer, generator = TrainerConfig(model=folder), GeneratorConfig(model=folder)
    found = find_layouts(size_of(folder), trainer, generator, work, H100, Efficiency(), **options)
    assert [each.time.step for each in found] == sorted(each.time.step for each in found)
    assert all(each.num_gpus <= 16 for each in found)
    assert all(trainer_memory(size_of(folder), each.trainer, H100).fits for each in found)
    assert all(generator_memory(size_of(folder), each.generator, H100).fits for each in found)


@pytest.mark.parametrize(("num_prompts", "measured"), [(64, (1.6, 2.1)), (32, (1.05, 1.05))])
def test_time_is_what_an_h100_took(num_prompts: int, measured: tuple[float, float], smollm2: Path) -> None:
    """The runs of SmolLM2-135M in benchmarks/RESULTS-gpu.md, of 16 completions of at most 12 tokens each."""
    work = Work(num_prompts=num_prompts, group_size=16, prompt_tokens=16, completion_tokens=12)
    trainer, generator = TrainerConfig(model=smollm2), GeneratorConfig(model=smollm2, max_num_seqs=512)
    computed = step_time(size_of(smollm2), trainer, generator, work, H100, Efficiency()).step
    assert 0.75 * measured[0] <= computed <= 1.25 * measured[1]


def test_no_size_is_negative(tmp_path: Path) -> None:
    size, config = size_of(write_qwen3(tmp_path, "8B")), GeneratorConfig(engine_args={"gpu_memory_utilization": 0.1})
    lines = "\n".join(memory_lines("generator", generator_memory(size, config, H100)))
    assert re.search(r"keys and values +0.00 GiB; \d+.\d+ GiB are missing", lines)
    assert "does not fit" in lines


@pytest.mark.seconds
def test_the_command_says_if_it_fits_and_refuses_as_engines_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_qwen3(tmp_path / "model", "8B"))
    words = ["plan", "grpo_qwen3_gpu", "--model-directory", folder]
    long = ["--trainer.data-parallel-shard", "8", "--trainer.max-tokens-per-microbatch", "65536"]
    assert run_command([*words, *long, "--trainer.activation-checkpointing", "none"]) == 1
    assert "does not fit" in capsys.readouterr().out
    fitting = ["--trainer.data-parallel-shard", "8", "--trainer.activation-checkpointing", "full"]
    assert run_command([*words, *fitting, "--price", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "8.19 billion parameters on 12 x h100; every figure is computed" in said
    assert "cost" in said
    hybrid = [*words[:2], "--model-directory", str(write_qwen3_5(tmp_path / "hybrid", "mixture"))]
    assert run_command(hybrid) == 2
    assert (
        "GeneratorConfig.tensor_parallel is 4; for Qwen3_5MoeForCausalLM it is proven up to 1"
        in capsys.readouterr().err
    )
    assert run_command([*hybrid, "--search", "2"]) == 0
    assert "x tensor_parallel=2" not in capsys.readouterr().out
    assert run_command([*words, "--trainer.tensor-parallel", "3"]) == 2
    assert "TrainerConfig.tensor_parallel is 3, which does not divide" in capsys.readouterr().err
    assert run_command([*words, "--gpu", "v100"]) == 2
    assert "--gpu is 'v100'" in capsys.readouterr().err
    assert run_command(["plan", "sft_qwen3_gpu", "--model-directory", folder]) == 2
    assert "plan is for loops that sample and train" in capsys.readouterr().err
    other = ["plan", "grpo_qwen3_gpu", "--model-directory", str(MODELS["gemma2"][1](tmp_path / "gemma2"))]
    assert run_command([*other, "--trainer.engine", "fsdp2", "--trainer.activation-checkpointing", "full"]) == 2
    assert "plan knows the models that torchtitan trains, and not this one: config.json" in capsys.readouterr().err
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1, "mfu": 0.25, "schema_version": 4}) + "\n")
    assert run_command([*words, *fitting, "--metrics", str(metrics)]) == 0
    # A quarter without the forward passes that full checkpointing repeats, which are a third of the rest.
    assert "assumed: 33% of the matrix rate" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "-5"])
@pytest.mark.parametrize("option", ["search", "completion-tokens", "prompt-tokens", "gpus-per-host"])
def test_a_number_of_nothing_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "grpo_qwen3_gpu", f"--{option}", value]) == 2
    assert f"error: --{option} is {value}; it must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["-1", "nan"])
def test_a_price_below_nothing_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "grpo_qwen3_gpu", "--price", price]) == 2
    assert "error: --price is" in capsys.readouterr().err


def test_a_model_that_no_host_serves_is_refused(tmp_path: Path) -> None:
    size = size_of(write_qwen3(tmp_path / "model", "8B"))
    work = Work(num_prompts=1, group_size=8, prompt_tokens=1, completion_tokens=1)
    options: dict[str, Any] = {"most_gpus": 16, "gpus_per_host": 1, "overlaps": False}
    with pytest.raises(ValueError, match="1 GPUs of 79 GiB do not hold 16 GB of weights"):
        find_layouts(
            size,
            TrainerConfig(),
            GeneratorConfig(model=tmp_path / "model", engine_args={"gpu_memory_utilization": 0.1}),
            work,
            H100,
            Efficiency(),
            **options,
        )
