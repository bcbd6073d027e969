"""What the MindSpore engine sends to its process, and what it refuses before one starts. Needs no MindSpore."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from examples.engines.mindspore_engine.arrays import attention_mask, parameter_shapes
from examples.engines.mindspore_engine.engine import MindSporeEngine
from examples.engines.mindspore_engine.layout_check import check_layout
from examples.engines.mindspore_engine.row import ROW
from examples.engines.mindspore_engine.start import PYTHON
from rl.data.packing import Document, pack_row
from rl.lora import LoRAConfig
from rl.system.hf_config import read_config, read_decoder_config
from rl.tiny_models import tiny_critic, tiny_dense, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.rl.data.row_definition import attended
from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.contract.reference import random_groups
from trainer.engines.model_check import ModelLimits


def test_parameters_are_those_of_the_files(tmp_path: Path) -> None:
    models = {
        "llama": tiny_llama(tmp_path / "llama"),
        "qwen2": tiny_dense("qwen2", tmp_path / "qwen2", tied=False),
        "qwen3": tiny_qwen3(tmp_path / "qwen3", tied=False),
        "critic": tiny_critic(tmp_path / "critic"),
    }
    for name, model in models.items():
        stored = {name: tuple(tensor.shape) for name, tensor in load_file(model / "model.safetensors").items()}
        assert parameter_shapes(read_decoder_config(model), "value" if name == "critic" else "lm") == stored


def test_a_token_attends_to_its_prefix_and_its_own_suffix() -> None:
    row = pack_row(random_groups([(7, (4, 4, 9)), (5, (3,)), (2, (2, 2))], vocab_size=2), share_prefixes=True)
    assert any(document.depths for document in row.documents)
    np.testing.assert_array_equal(attention_mask(row.documents) == 0, attended(row.documents))
    assert attention_mask([Document(1)]).dtype == np.float32


def test_limits_are_those_of_the_model(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path), compute_dtype="float32")
    assert check_layout(config, read_config(config.model)) == ModelLimits(vocab_size=64, max_seq_len=128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel": 2}, "the layout has 2 ranks; the MindSpore engine shards nothing and has one"),
        ({"compute_dtype": "bfloat16"}, "compute_dtype is 'bfloat16'; with the MindSpore engine it must be 'float32'"),
        ({"compile": True}, "compile is True; .* it must be False"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing is 'full'; .* it must be 'none'"),
        ({"lora": LoRAConfig(rank=2)}, "lora is LoRAConfig.* it must be None"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = replace(TrainerConfig(model=tiny_llama(tmp_path), compute_dtype="float32"), **options)
    with pytest.raises(ValueError, match=message):
        MindSporeEngine(config)


def test_experts_are_refused(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_qwen3_moe(tmp_path), compute_dtype="float32")
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM.*; the MindSpore engine trains the families llama"):
        check_layout(config, read_config(config.model))


def test_without_its_environment_it_says_where_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, str(tmp_path / "python"))
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), compute_dtype="float32")
    with pytest.raises(ValueError, match=r"python does not exist; .*README\.md says how to make"):
        MindSporeEngine(config)


def test_the_row_names_the_engine() -> None:
    assert ROW.engine == f"{MindSporeEngine.__module__}:{MindSporeEngine.__name__}"
    assert ROW.layout_check == f"{check_layout.__module__}:{check_layout.__name__}"
    assert issubclass(MindSporeEngine, Engine)
