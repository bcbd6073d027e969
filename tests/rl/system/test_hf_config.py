import contextlib
import itertools
import json
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from rl.system.hf_config import (
    end_token_ids,
    inspect_model,
    is_tied,
    parse_decoder_config,
    read_config,
    rope_parameters,
)
from rl.system.model_files import stored_shapes, weight_files
from rl.tiny_models import TINY_SHAPE, VOCAB_SIZE, tiny_dense, tiny_llama, tiny_qwen3, tiny_qwen3_moe


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A complete model directory, for a test to break."""
    return tiny_llama(tmp_path / "model", tied=True)


def edit_config(model: Path, **changes: Any) -> None:
    """Overwrites keys of config.json; None removes one."""
    file = model / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_agrees_with_transformers(make: Any, tied: bool, tmp_path: Path) -> None:
    info = inspect_model(make(tmp_path / "model", tied=tied))
    config: Any = AutoConfig.from_pretrained(tmp_path / "model")
    assert info.architecture == config.architectures[0]
    assert (info.vocab_size, info.max_context) == (VOCAB_SIZE, config.max_position_embeddings)
    settings = read_config(tmp_path / "model")
    assert (is_tied(settings), settings["num_key_value_heads"]) == (tied, config.num_key_value_heads)
    assert (settings["hidden_size"], settings["num_hidden_layers"]) == (config.hidden_size, config.num_hidden_layers)
    assert end_token_ids(tmp_path / "model", settings) == (config.eos_token_id,)
    assert weight_files(tmp_path / "model") == (tmp_path / "model" / "model.safetensors",)


def test_generation_config_may_name_more_end_tokens(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    assert end_token_ids(model, read_config(model)) == (256, 257)


@pytest.mark.parametrize("odd", ["</s>", 2.0, True, [2, None], [2, "3"], [[2]], {"a": 1}])
def test_end_tokens_that_are_no_ids_are_refused(model: Path, odd: Any) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": odd}))
    with pytest.raises(ValueError, match=re.escape(f"eos_token_id is {odd!r}; it must be a token id")):
        inspect_model(model)


def test_key_value_heads_default_to_attention_heads(model: Path) -> None:
    edit_config(model, num_key_value_heads=None)
    assert read_config(model)["num_key_value_heads"] == 4


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist"):
        inspect_model(tmp_path / "nowhere")


def test_a_file_is_no_directory(model: Path) -> None:
    with pytest.raises(ValueError, match="not a directory"):
        inspect_model(model / "config.json")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_missing_file(model: Path, missing: str, message: str) -> None:
    (model / missing).unlink()
    with pytest.raises(ValueError, match=message):
        inspect_model(model)


def test_weights_in_another_format_are_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no weights.*pytorch_model\.bin cannot be used"):
        inspect_model(model)


def test_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors,"):
        inspect_model(model)


def test_sharded_weights(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    inspect_model(model)
    assert weight_files(model) == (model / "model-00001-of-00001.safetensors",)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_that_were_cut_off(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is incomplete or not a safetensors file"):
        inspect_model(model)


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 16, b"\2" + bytes(7) + b"[]", b"\x08" + bytes(7) + b'{"a":{}}']
)
def test_weights_of_another_format_are_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    for read in (inspect_model, stored_shapes):
        with pytest.raises(ValueError, match=r"model\.safetensors is incomplete or not a safetensors file"):
            read(model)


def test_what_is_no_language_model_names_the_proven(model: Path) -> None:
    edit_config(model, architectures=["BertModel"])
    with pytest.raises(ValueError, match="BertModel, which is no language model; proven are "):
        inspect_model(model)


@pytest.mark.parametrize(("spelling", "kind"), [("rope_parameters", "rope_type"), ("rope_scaling", "type")])
def test_scaling_by_length_ends_the_context_before_it(model: Path, spelling: str, kind: str) -> None:
    edit_config(model, rope_parameters=None, original_max_position_embeddings=64)
    edit_config(model, **{spelling: {kind: "longrope"}})
    assert inspect_model(model).max_context == 64
    edit_config(model, **{spelling: {kind: "llama3"}})
    assert inspect_model(model).max_context == 128


def test_gemma_is_tied_without_saying_so(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    for family, tied in (("gemma3_text", True), ("gemma2", True), ("llama", False)):
        (model / "config.json").write_text(json.dumps({**config, "model_type": family}))
        assert is_tied(read_config(model)) == tied


def test_quantised_weights(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match="quantised"):
        inspect_model(model)


@pytest.mark.parametrize("value", [0, -3, "8", True, None])
def test_a_size_that_makes_no_sense(model: Path, value: Any) -> None:
    edit_config(model, num_attention_heads=value)
    with pytest.raises(ValueError, match=r"num_attention_heads is .* above 0"):
        inspect_model(model)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_config_that_is_no_object(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        inspect_model(model)


SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings")
EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
OTHERS = ("attention_bias", "mlp_bias", "hidden_act", "attention_dropout", "eos_token_id", "quantization_config")
ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "num_experts")
FAMILIES = [tiny_llama, partial(tiny_dense, "mistral"), partial(tiny_dense, "qwen2"), tiny_qwen3, tiny_qwen3_moe]


@pytest.mark.stranger("A5")
@pytest.mark.parametrize("make", FAMILIES)
def test_absent_and_null_keys_mean_the_same_to_transformers(make: Any, tmp_path: Path) -> None:
    model = make(tmp_path)
    stated = json.loads((model / "config.json").read_text())
    for key, value in itertools.product((*SIZES, *EXPERTS, *OTHERS, *ROPE), ("absent", None)):
        changed = {name: value for name, value in stated.items() if name != key} | ({} if value else {key: None})
        (model / "config.json").write_text(json.dumps(changed))
        expected: Any = None
        with contextlib.suppress(StrictDataclassError):
            expected = AutoConfig.from_pretrained(model)
        if expected is None or (make is tiny_qwen3_moe and expected.num_experts is None):
            with pytest.raises(ValueError, match=rf"model directory .*: {key} is null in"):
                read_config(model)
            continue
        found = read_config(model)
        for name in (*SIZES, *EXPERTS, *OTHERS):
            if name != "head_dim":  # compared below
                stated_as = "num_experts" if name == "num_local_experts" and name not in found else name
                assert found.get(stated_as) == getattr(expected, name, None), (key, value, name)
        # torchtitan trains no model with a window, and a plug-in knows the shape of the mixture.
        if getattr(expected, "sliding_window", None) is None and make is not tiny_qwen3_moe:
            decoder = parse_decoder_config(found)
            assert decoder.head_dim == (getattr(expected, "head_dim", None) or 8)
            assert decoder.rope_theta == expected.rope_parameters["rope_theta"]


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BASE = {"rope_type": "default", "rope_theta": 7.0}


@pytest.mark.stranger("A4")
@pytest.mark.parametrize("new", [None, {}, BASE, LLAMA3, {**LLAMA3, "rope_theta": 7.0}, YARN])
@pytest.mark.parametrize("old", ["absent", None, {}, {"type": "default"}, LLAMA3, YARN, {**BASE, "rope_theta": 9.0}])
@pytest.mark.parametrize("theta", ["absent", 11.0])
def test_the_scaling_is_the_one_that_transformers_takes(tmp_path: Path, new: Any, old: Any, theta: Any) -> None:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **TINY_SHAPE, "rope_parameters": new}
    config |= {key: v for key, v in (("rope_scaling", old), ("rope_theta", theta)) if v != "absent"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    found = read_config(tmp_path)
    if expected["rope_type"] == "yarn":
        with pytest.raises(ValueError, match="rope_type is 'yarn'"):
            parse_decoder_config(found)
        return
    decoder = parse_decoder_config(found)
    assert decoder.rope_theta == expected["rope_theta"]
    scaling = decoder.rope_scaling
    assert (scaling is not None) == (expected["rope_type"] == "llama3")
    if scaling is not None:
        assert asdict(scaling) == {name: expected[name] for name in asdict(scaling)}


@pytest.mark.stranger("2.D9")
@pytest.mark.parametrize("beside", ["absent", 16, 64])
@pytest.mark.parametrize("within", ["absent", 32])
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_the_length_before_scaling_is_the_one_that_transformers_takes(
    tmp_path: Path, spelling: str, kind: str, within: Any, beside: Any
) -> None:
    length = "original_max_position_embeddings"
    rope = {**(LLAMA3 if kind == "llama3" else YARN), "rope_theta": 7.0}
    rope = {name: value for name, value in rope.items() if name != length} | (
        {} if within == "absent" else {length: within}
    )
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY_SHAPE, spelling: rope}
    config |= {} if beside == "absent" else {length: beside}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path)
    expected.standardize_rope_params()  # as a model of it does
    assert rope_parameters(read_config(tmp_path)) == expected.rope_parameters
