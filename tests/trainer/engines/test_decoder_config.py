"""Which models are taken, and what is read from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.system.decoders import Llama3RopeScaling
from rl.system.hf_config import parse_decoder_config, read_decoder_config
from rl.tiny_models import tiny_llama, tiny_qwen3
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.titan.layout_check import check_layout

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_both_spellings_of_rotary_embeddings_are_read() -> None:
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    assert parse_decoder_config(new) == parse_decoder_config(old)
    assert parse_decoder_config(new).rope_theta == 5e5
    assert parse_decoder_config(new).rope_scaling == Llama3RopeScaling(**LLAMA3)  # pyright: ignore[reportArgumentType]
    assert parse_decoder_config({**LLAMA, "rope_theta": 7.0, "rope_scaling": None}).rope_theta == 7.0


def test_head_size_is_derived_where_absent() -> None:
    assert parse_decoder_config(LLAMA).head_dim == 8
    assert parse_decoder_config({**LLAMA, "head_dim": 16}).head_dim == 16
    assert parse_decoder_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]; this engine's are .*Llama"),
        ({"architectures": None}, "architectures is"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "sliding_window is 4096; only None is supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'; supported are"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_what_cannot_be_trained_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_decoder_config({key: value for key, value in {**LLAMA, **change}.items() if value is not None})


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        read_decoder_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        read_decoder_config(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights"):
        load_engine(TrainerConfig(model=tmp_path))


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, tied=False)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "intermediate_size": 7}))
    with pytest.raises(ValueError, match=r"gate_proj.weight has shape \(48, 32\); config.json asks for \(7, 32\)"):
        load_engine(TrainerConfig(model=tmp_path))
    file.write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"no weight 'model.layers.2"):
        load_engine(TrainerConfig(model=tmp_path))


def check(decoder: dict[str, Any], **layout: Any) -> None:
    check_layout(TrainerConfig(**layout), decoder)


def test_tensor_parallel_must_divide_the_heads() -> None:
    check(LLAMA, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"tensor_parallel is 4, .* num_kv_heads 2; .* \[1, 2\]"):
        check(LLAMA, tensor_parallel=4)


def test_ranks_of_a_pipeline_are_given_the_same_share() -> None:
    config = TrainerConfig(pipeline_parallel=2, data_parallel_shard=2, tensor_parallel=2)
    assert (config.num_ranks, config.num_data_parallel_ranks, config.num_model_parallel_ranks) == (8, 2, 4)
    assert [config.data_parallel_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_an_unknown_engine_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"TrainerConfig\.engine is 'fsdp3'"):
        TrainerConfig(engine="fsdp3")


def test_float8_needs_bfloat16() -> None:
    with pytest.raises(ValueError, match=r"compute_dtype is 'float32'; .* must be 'bfloat16'"):
        TrainerConfig(float8="rowwise", compute_dtype="float32")


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"asks for 2 ranks .* WORLD_SIZE is 1"):
        load_engine(TrainerConfig(model=tiny_llama(tmp_path), data_parallel_shard=2))
