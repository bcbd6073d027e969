"""Directories of models that read images whose config.json lacks a value."""

from pathlib import Path

import pytest

from ownloop_vision.tiny_vl import tiny_gemma3, tiny_qwen3_vl
from tests.trainer.engines.odd_configs import assert_odd_is_refused, miss_every_value

MODELS = {"gemma3": tiny_gemma3, "qwen3_vl": tiny_qwen3_vl}


@pytest.mark.parametrize(
    ("null", "message"),
    [(False, "config.json lacks 'vision_config'"), (True, "config.json has a value of a wrong kind")],
)
def test_an_odd_model_directory_is_one_sentence(null: bool, message: str, tmp_path: Path) -> None:
    assert_odd_is_refused(tiny_gemma3(tmp_path / "model"), "fsdp2", "vision_config", null=null, message=message)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_value_of_a_config_may_be_missed_without_a_sentence(name: str, tmp_path: Path) -> None:
    miss_every_value(MODELS[name](tmp_path / "model"))
