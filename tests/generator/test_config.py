"""A generator's configuration refuses what cannot be served, before anything starts."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.config import GeneratorConfig, LoRALimits
from generator.options import check_hardware, cpu_block_size, engine_options, generator_env
from rl.tiny_models import tiny_llama
from tests.architectures import MODELS
from tests.generator.served_models import served_llama
from tests.waiting import LIMIT_S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_args": {"max_loras": 2}}, r"set GeneratorConfig\.lora\.max_adapters instead"),
        ({"engine_args": {"max_num_batched_token": 9}}, r"not proven .*did you mean 'max_num_batched_tokens'"),
        ({"engine_args": {"tensor_parallel_size": 2}}, r"set GeneratorConfig\.tensor_parallel instead"),
        ({"engine_args": {"logprobs_mode": "raw_logits"}}, r"must be left out: the generator sets it"),
        ({"engine_args": {"quantization": "fp8"}}, r"is 'fp8' and must be left out: .* nothing can be pulled into"),
        ({"engine_args": {"moe_backend": "flashinfer_trtllm"}}, r"must be left out: others than 'triton'"),
        (
            {"engine_args": {"hf_overrides": {"head_dtype": "float32"}}},
            r"GeneratorConfig\.head_dtype sets the head's dtype",
        ),
        ({"engine_args": {"enable_eplb": True}}, r"must be left out: vLLM would move experts between ranks"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeneratorConfig(**options)


@pytest.mark.stranger("2.E6")
@pytest.mark.parametrize(
    "name",
    (
        "speculative_config spec_method spec_tokens kv_transfer_config kv_offloading_size hf_overrides hf_config_path "
        "model_weights model_class_overrides logits_processors quantization_config override_generation_config "
        "kv_cache_dtype model_impl additional_config load_format trust_remote_code worker_cls scheduler_cls revision "
        "lora_dtype mm_processor_kwargs mamba_cache_dtype data_parallel_rank compilation_config tokenizer"
    ).split(),
)
def test_options_that_may_change_what_is_sampled_are_refused(name: str) -> None:
    reasons = "must be left out|set GeneratorConfig.speculation instead"
    with pytest.raises(ValueError, match=rf"engine_args\['{name}'\].*({reasons})"):
        GeneratorConfig(engine_args={name: {}})


def test_no_other_option_of_vllm_is_taken_than_those_that_were_judged() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def is_taken(name: str) -> bool:
        try:
            return GeneratorConfig(engine_args={name: None}).engine_args == {name: None}
        except ValueError:
            return False

    assert {field.name for field in fields(EngineArgs) if is_taken(field.name)} == {
        *("attention_backend", "block_size", "disable_custom_all_reduce", "enable_chunked_prefill"),
        *("enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "kv_cache_memory_bytes"),
        *("max_logprobs", "max_num_batched_tokens", "seed"),
    }


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"which holds no config\.json"):
        GeneratorConfig(model=tmp_path).check_model()
    model = served_llama(tmp_path / "model", tied=True)
    GeneratorConfig(model=model, max_model_len=128, tensor_parallel=4).check_model()
    with pytest.raises(ValueError, match=r"tensor_parallel is 3; .* split over 1, 2, 4 ranks"):
        GeneratorConfig(model=model, max_model_len=128, tensor_parallel=3).check_model()
    with pytest.raises(ValueError, match="max_model_len is 4096; this model's context is 128"):
        GeneratorConfig(model=model, max_model_len=4096).check_model()
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights"):
        GeneratorConfig(model=model, max_model_len=128).check_model()


def test_what_the_cpu_cannot_do_is_named(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("hardware: this host has a GPU")
    check_hardware(GeneratorConfig(model=served_llama(tmp_path / "served", tied=True)))
    narrow = GeneratorConfig(model=tiny_llama(tmp_path / "narrow"))
    with pytest.raises(ValueError, match="attention heads have 8 dimensions; on the CPU vLLM can do 32, 64, 80"):
        check_hardware(narrow)
    compiled = GeneratorConfig(model=tmp_path / "served", engine_args={"enforce_eager": False})
    with pytest.raises(ValueError, match="with the weights it had before a pull"):
        check_hardware(compiled)


def test_an_architecture_that_vllm_lacks_is_refused(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["TestForCausalLM"]}))
    with pytest.raises(
        ValueError, match="of architecture TestForCausalLM, which vLLM has no code of its own for; proven "
    ):
        GeneratorConfig(model=model, max_model_len=32).check_model()
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["StableLmForCausalLM"]}))
    GeneratorConfig(model=model, max_model_len=32).check_model()  # unproven, which the trainer warns of


@pytest.mark.stranger("E1")
@pytest.mark.parametrize(
    ("changes", "max_model_len", "room"),
    [
        ({}, 128, 1),
        ({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 63, 1),
        ({"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, 64, 0),
        ({"model_type": "llama4_text"}, 32768, 0),
        ({"model_type": "llama4_text"}, 32767, 1),
    ],
)
def test_a_context_is_a_token_longer_where_that_changes_nothing(
    tmp_path: Path, changes: dict[str, Any], max_model_len: int, room: int
) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = json.loads((model / "config.json").read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    assert engine_options(GeneratorConfig(model=model, max_model_len=max_model_len))["max_model_len"] == (
        max_model_len + room
    )


def test_engine_args_have_the_last_word(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = GeneratorConfig(model=model, max_model_len=128, engine_args={"block_size": 64, "seed": 3})
    options = engine_options(config)
    assert (options["block_size"], options["seed"]) == (64, 3)
    json.dumps(options)


@pytest.mark.parametrize(
    ("features", "machine", "dtype", "size"),
    [
        ({"avx512f", "avx512_bf16"}, "x86_64", "bfloat16", 16),
        ({"amx_bf16"}, "x86_64", "bfloat16", 32),
        ({"amx_bf16"}, "x86_64", "float32", 16),
        ({"bf16"}, "aarch64", "float32", 32),
    ],
)
def test_blocks_are_as_small_as_the_kernel_allows(
    monkeypatch: pytest.MonkeyPatch, features: set[str], machine: str, dtype: str, size: int
) -> None:
    monkeypatch.setattr("generator.options.cpu_features", lambda: frozenset(features))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert cpu_block_size(dtype) == size


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_rank": 0}, r"max_rank is 0"),
        ({"max_adapters": 0}, r"max_adapters is 0"),
        ({"max_adapters": 9, "max_loaded": 8}, r"max_loaded is 8; it must be at least max_adapters, 9"),
    ],
)
def test_wrong_limits_of_adapters_are_named(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRALimits(**limits)


def test_adapters_get_the_next_rank_that_vllm_knows(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    config = GeneratorConfig(model=model, max_model_len=128, lora=LoRALimits(max_rank=33))
    options = engine_options(config)
    assert (options["max_lora_rank"], options["max_loras"], options["max_cpu_loras"]) == (64, 4, 33)
    # The first runner draws the random numbers of seeded requests one after the other: 3 ms a token at 256 requests.
    assert "VLLM_USE_V2_MODEL_RUNNER" not in generator_env(config, has_gpu=True)


def test_adapters_of_vision_need_a_model_that_reads_images(tmp_path: Path) -> None:
    config = GeneratorConfig(model=served_llama(tmp_path / "m", tied=True), lora=LoRALimits(vision=True))
    with pytest.raises(ValueError, match=r"LoRALimits\.vision is True and .* is a model of text"):
        config.check_model()


def test_the_controller_side_does_not_import_vllm() -> None:
    source = "import sys, controller.handles.generator_handle; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, cwd=Path(__file__).parents[2], timeout=120)


def test_gpu_logic_the_environment_is_that_of_its_host() -> None:
    config = GeneratorConfig(num_threads=3)
    assert "VLLM_CPU_OMP_THREADS_BIND" in generator_env(config, has_gpu=False)
    on_gpu = generator_env(config, has_gpu=True)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in on_gpu
    assert on_gpu["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "it would be compiled at every start, and never used"


MARKED = """
import torch
from torch._dynamo.utils import counters
from vllm.model_executor.layers.vocab_parallel_embedding import get_masked_input_and_mask
tokens, _ = get_masked_input_and_mask(torch.tensor([1, 5]), 0, 4, 0, 0, 0)
print(tokens.tolist(), dict(counters["frames"]))
"""


@pytest.mark.seconds
@pytest.mark.slow
def test_functions_of_vllm_are_not_compiled_on_the_cpu(tmp_path: Path) -> None:
    config = GeneratorConfig(model=served_llama(tmp_path / "served", tied=True))
    env = {**os.environ, **generator_env(config, has_gpu=False)}
    done = subprocess.run(
        [sys.executable, "-c", MARKED], env=env, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout.splitlines()[-1] == "[1, 0] {}"


def test_generators_of_several_ranks_are_refused_if_not_proven(tmp_path: Path) -> None:
    model = MODELS["olmo3"][1](tmp_path / "model")
    GeneratorConfig(model=model, max_model_len=64).check_model()
    with pytest.raises(ValueError, match="tensor_parallel is 2; for Olmo3ForCausalLM it is proven up to 1"):
        GeneratorConfig(model=model, max_model_len=64, tensor_parallel=2).check_model()
