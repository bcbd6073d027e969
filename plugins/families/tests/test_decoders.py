"""What torchtitan does not build of a family is refused by name, and YaRN's factors are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ownloop_families import qwen3_5
from ownloop_families.shapes import read_yarn
from ownloop_families.tiny import TINY_FAMILIES as MODELS
from rl.system.decoders import ExpertsConfig
from rl.system.hf_config import parse_decoder_config, read_config
from rl.tiny_models import random_batch
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import ReferencePolicy
from trainer.engines.model_check import check_model

LONG = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek_v3", "glm4_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param][1](tmp_path_factory.mktemp("model") / request.param)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, r"TrainerConfig\.compile is True; for \S+ only False is proven with engine 'torchtitan'"),
        ({"float8": "rowwise"}, r"TrainerConfig\.float8 is 'rowwise'; for \S+ only 'none' is proven"),
        ({"tensor_parallel": 2}, r"tensor parallelism cannot split experts"),
    ],
)
def test_what_is_not_proven_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    check_model(TrainerConfig(model=model))
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=model, **options))


@pytest.mark.parametrize(
    ("name", "key", "size"),
    [
        ("deepseek_v3", "intermediate_size", 191),
        ("qwen3_5_moe", "linear_num_key_heads", 1),
        ("qwen3_5_moe", "shared_expert_intermediate_size", 63),
    ],
)
def test_ranks_that_cannot_cut_a_layer_are_refused(tmp_path: Path, name: str, key: str, size: int) -> None:
    model = MODELS[name][1](tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: size}))
    with pytest.raises(ValueError, match=f"tensor_parallel is 2, which does not divide the model's {key} {size}"):
        check_model(TrainerConfig(model=model, tensor_parallel=2, expert_parallel=2))


@pytest.mark.parametrize(
    ("name", "family", "option"),
    [
        ("gpt_oss", "gpt_oss", "context_parallel"),
        ("qwen3_5", "qwen3_5", "context_parallel"),
    ],
)
def test_layouts_that_are_not_proven_are_refused(tmp_path: Path, name: str, family: str, option: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    options: dict[str, Any] = {option: 2}
    with pytest.raises(ValueError, match=f"{option} is 2; for {family} only 1 is proven"):
        check_model(TrainerConfig(model=model, **options))


def test_published_settings_of_qwen3_5_are_read(tmp_path: Path) -> None:
    settings = dict(read_config(MODELS["qwen3_5_moe"][1](tmp_path / "model")))
    for key in ("intermediate_size", "layer_types", "head_dim", "partial_rotary_factor", "rope_parameters"):
        del settings[key]
    shape = qwen3_5.decoder({**settings, "num_hidden_layers": 5})
    assert shape.attends == (False, False, False, True, False)
    assert (shape.head_dim, shape.rotary_dim) == (256, 64)


def test_both_spellings_of_experts_are_read(tmp_path: Path) -> None:
    settings = dict(read_config(MODELS["qwen3_moe"][1](tmp_path / "model")))
    count = settings.pop("num_experts", None) or settings.pop("num_local_experts")
    settings.pop("num_local_experts", None)
    expected = ExpertsConfig(num_experts=4, experts_per_token=2, hidden_dim=64, normalize_scores=True)
    for spelling in ("num_experts", "num_local_experts"):
        assert parse_decoder_config({**settings, spelling: count}).moe == expected
    assert parse_decoder_config({**settings, "head_dim": None}).head_dim == 128 // 4


def test_settings_that_would_change_the_model_are_refused(tmp_path: Path) -> None:
    for name, change, message in (
        ("gpt_oss", {"attention_bias": False}, "attention_bias is False; only True is supported"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be between 1 and the 4"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False; only True is supported"),
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave is None; only True is supported"),
        ("deepseek_v3", {"topk_group": 0}, "topk_group is 0; it must be between 1 and n_group, 2"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias is True; only False is supported"),
        ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor is 0; it must"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]; only \[\] is"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; only 1 is"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must be between 1 and the 4 experts"),
        ("gpt_oss", {"rope_parameters": {"rope_theta": 1e4}}, "without rope_type; state it, 'yarn' or"),
    ):
        settings = read_config(MODELS[name][1](tmp_path / f"{name}-{message[:15]}"))
        with pytest.raises(ValueError, match=message):
            parse_decoder_config({**settings, **change})
    with pytest.raises(ValueError, match="rope_type is 'linear'; supported are 'default' and 'yarn'"):
        read_yarn({"rope_type": "linear"}, 128)


def test_a_gpt_oss_without_rotary_settings_is_scaled(tmp_path: Path) -> None:
    model = MODELS["gpt_oss"][1](tmp_path / "model")
    file = model / "config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in stated.items() if key != "rope_parameters"}))
    batch = random_batch((40,))
    (found,) = load_engine(TrainerConfig(model=model, compute_dtype="float32")).forward([batch], entropy=False).logprobs
    reference = ReferencePolicy(model)
    scored = batch[0].weights > 0
    assert found[scored] == pytest.approx(reference.logprobs(batch[0]).detach().numpy()[scored], abs=2e-5)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707},
        {"attention_factor": 1.3},
        {"attention_factor": 0.0},
    ],
)
def test_yarn_scales_as_in_transformers(tmp_path: Path, more: dict[str, float]) -> None:
    model = MODELS["gpt_oss"][1](tmp_path / "model")
    file = model / "config.json"
    rope = {**LONG, "rope_theta": 10000.0, **more}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(model))
    yarn = read_yarn(rope, 128)
    assert yarn is not None
    assert yarn.attention_factor == pytest.approx(expected, rel=1e-12)
