"""What is not proven with drafts is refused by name, before any process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from generator.config import GeneratorConfig, Speculation
from generator.options import check_hardware, engine_options
from rl.tiny_models import SERVABLE, tiny_llama, tiny_qwen3_moe


def config_of(model: Path, **options: Any) -> GeneratorConfig:
    return GeneratorConfig(model=model, speculation=Speculation(max_draft=5), **options)


def test_what_is_not_proven_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model", **SERVABLE)
    check_hardware(config_of(model), has_gpu=False)
    with pytest.raises(ValueError, match=r"speculation is 'history' and must be None: it is not proven on GPUs"):
        check_hardware(config_of(model), has_gpu=True)
    experts = tiny_qwen3_moe(tmp_path / "experts", **SERVABLE)
    with pytest.raises(ValueError, match=r"must be None: it is not proven with routes"):
        check_hardware(config_of(experts, routes=True), has_gpu=False)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "mamba_d_state": 16}))
    with pytest.raises(ValueError, match=r"recurrent layers, and model has mamba_d_state"):
        check_hardware(config_of(model), has_gpu=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "histroy"}, r"source is 'histroy': not known; did you mean 'history'"),
        ({"max_draft": 0}, r"max_draft is 0"),
        ({"min_chance": 1.5}, r"min_chance is 1.5"),
        ({"max_kept_tokens": 0}, r"max_kept_tokens is 0"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Speculation(**options)


def test_vllm_gets_a_drafter_of_the_longest_draft(tmp_path: Path) -> None:
    options = engine_options(config_of(tiny_llama(tmp_path / "model", **SERVABLE)))
    assert options["speculative_config"]["num_speculative_tokens"] == 5
