"""Directories of families whose config.json lacks a value, or has one that is not proven."""

from pathlib import Path
from typing import Any

import pytest

from ownloop_families.tiny import TINY_FAMILIES
from rl.tiny_models import tiny_qwen3_moe
from tests.trainer.engines.odd_configs import assert_odd_is_refused, assert_refused_as_vllm_differs, miss_every_value


@pytest.mark.parametrize(
    ("family", "engine", "key", "null", "message"),
    [
        ("gpt_oss", "torchtitan", "rope_parameters.factor", False, "config.json lacks 'factor'"),
        ("gpt_oss", "fsdp2", "num_hidden_layers", False, "config.json lacks 'num_hidden_layers'"),
        ("deepseek_v3", "torchtitan", "v_head_dim", True, "config.json has a value of a wrong kind"),
        ("qwen3_5", "torchtitan", "rope_parameters.rope_theta", True, "config.json has a value of a wrong kind"),
    ],
)
def test_an_odd_model_directory_is_one_sentence(
    family: str, engine: str, key: str, null: bool, message: str, tmp_path: Path
) -> None:
    assert_odd_is_refused(TINY_FAMILIES[family][1](tmp_path / "model"), engine, key, null=null, message=message)


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_no_value_of_a_config_may_be_missed_without_a_sentence(family: str, tmp_path: Path) -> None:
    miss_every_value(TINY_FAMILIES[family][1](tmp_path / "model"))


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (tiny_qwen3_moe, "attention_bias", True),
        (tiny_qwen3_moe, "hidden_act", "gelu"),
        (TINY_FAMILIES["gemma4"][1], "hidden_activation", "silu"),
    ],
)
def test_settings_that_vllm_understands_otherwise_are_refused(tmp_path: Path, make: Any, key: str, value: Any) -> None:
    assert_refused_as_vllm_differs(make(tmp_path / "model"), key, value)
