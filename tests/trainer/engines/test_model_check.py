"""What the controller refuses before any process starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.tiny_models import tiny_llama, tiny_qwen3
from tests.architectures import MODELS
from tests.trainer.engines.odd_configs import assert_odd_is_refused, assert_refused_as_vllm_differs, miss_every_value
from tests.waiting import LIMIT_S
from trainer.config import TrainerConfig
from trainer.engines.model_check import ModelLimits, check_model, describe_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def change(model: Path, **values: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("engine", "key", "null", "message"),
    [
        ("torchtitan", "num_hidden_layers", False, "config.json lacks 'num_hidden_layers'"),
        ("torchtitan", "num_attention_heads", True, "config.json has a value of a wrong kind|num_attention_heads is"),
    ],
)
def test_an_odd_model_directory_is_one_sentence(model: Path, engine: Any, key: str, null: bool, message: str) -> None:
    assert_odd_is_refused(model, engine, key, null=null, message=message)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_value_of_a_config_may_be_missed_without_a_sentence(name: str, tmp_path: Path) -> None:
    miss_every_value(MODELS[name][1](tmp_path / "model"))


@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_limits_are_those_of_the_model(model: Path, engine: Any) -> None:
    assert check_model(TrainerConfig(model=model, engine=engine)) == ModelLimits(vocab_size=64, max_seq_len=128)


def test_unknown_architecture_is_for_transformers_to_judge(model: Path) -> None:
    change(model, architectures=["NewForCausalLM"], max_position_embeddings=77)
    with pytest.raises(ValueError, match="NewForCausalLM"):
        check_model(TrainerConfig(model=model))
    assert check_model(TrainerConfig(model=model, engine="fsdp2")).max_seq_len == 77
    assert describe_model(model, "lm")["architectures"] == ["NewForCausalLM"]
    change(model, vocab_size=None)
    with pytest.raises(ValueError, match="vocab_size is null"):
        check_model(TrainerConfig(model=model, engine="fsdp2"))


@pytest.mark.parametrize(
    ("tied", "options", "message"),
    [
        (True, {}, r"pipeline_parallel is 2; .*tie_word_embeddings.* tensor_parallel and context_parallel work"),
        (False, {"pipeline_parallel": 4}, "makes 4 stages; the model has 2 layers .* it must be at most 2"),
        (
            False,
            {"pipeline_schedule": "Interleaved1F1B"},
            "makes 4 stages; the model has 2 layers .* at most 1, or pipeline_schedule '1F1B'",
        ),
        (False, {"engine": "fsdp2"}, "only shards data"),
    ],
)
def test_pipelines_that_do_not_fit_are_refused(
    tmp_path: Path, tied: bool, options: dict[str, Any], message: str
) -> None:
    model = tiny_llama(tmp_path / "model", tied=tied)
    layout: dict[str, Any] = {"pipeline_parallel": 2, **options}
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=model, **layout))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel is 2; engine 'fsdp2' only shards data, .*'torchtitan' has the other"),
        (
            {"data_parallel_shard": 2, "expert_parallel": 2},
            "expert_parallel is 2; engine 'fsdp2' only shards data, so it must be 1",
        ),
        ({"activation_checkpointing": "selective"}, "engine 'fsdp2' has 'none' and 'full'"),
        ({"compile": True}, "compile is True; engine 'fsdp2' leaves models as they are, so it must be False"),
        ({"float8": "rowwise"}, "float8 is 'rowwise'; engine 'fsdp2' leaves models as they are, so it must be 'none'"),
    ],
)
def test_what_fsdp2_cannot_do_is_refused(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(TrainerConfig(model=model, engine="fsdp2", **options))


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (tiny_llama, "partial_rotary_factor", 0.5),
        (tiny_qwen3, "attention_bias", True),
    ],
)
def test_settings_that_vllm_understands_otherwise_are_refused(tmp_path: Path, make: Any, key: str, value: Any) -> None:
    assert_refused_as_vllm_differs(make(tmp_path / "model"), key, value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="hardware: a GPU may have float8")
def test_float8_is_refused_where_it_cannot_work(model: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"float8 is 'rowwise', which needs an NVIDIA GPU of compute capability 8.9 .*; this host has no GPU",
    ):
        check_model(TrainerConfig(model=model, float8="rowwise"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="hardware: a GPU compiles with Triton")
def test_compilation_is_refused_without_a_compiler(model: Path) -> None:
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (None, "no-such-compiler")}),
        pytest.raises(ValueError, match=r"compile is True, which needs a C\+\+ compiler"),
    ):
        check_model(TrainerConfig(model=model, compile=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="hardware: a GPU compiles with Triton")
def test_compilation_is_refused_where_it_fails(model: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel is 2, which torch does not compile .* without GPU"):
        check_model(TrainerConfig(model=model, compile=True, tensor_parallel=2))


def test_a_check_loads_no_engine(model: Path) -> None:
    code = (
        "import sys; from trainer.config import TrainerConfig; from trainer.engine_table import ENGINES\n"
        "assert 'torch' not in sys.modules\n"
        "from pathlib import Path; from trainer.engines.model_check import check_model\n"
        "names = [name for name, entry in ENGINES.items() if not entry.requires]\n"
        "for name in names: check_model(TrainerConfig(model=Path(sys.argv[1]), engine=name))\n"
        "assert not {'torchtitan', 'transformers', 'megatron'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, model], check=True, timeout=LIMIT_S)
