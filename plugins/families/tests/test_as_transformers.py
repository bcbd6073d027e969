"""Every family: log-probs and gradients are transformers', weights keep their names, and the page has its row."""

from pathlib import Path

import pytest

from ownloop_families.tiny import TINY_FAMILIES as MODELS
from tests.docs.pages import ROOT, table_of_architectures
from tests.trainer.engines.as_transformers import assert_as_transformers

DECAYS = ("A_log", "dt_bias")
"""Parameters of the gated delta rule of whose gradients transformers' float32 is itself 2e-5 from float64."""
BUILT_BY_TORCHTITAN = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_moe", "qwen3_5", "qwen3_5_moe")
BOUNDS = {"qwen3_5_moe": 3e-5}
"""Worst relative errors of gradients other than 1e-5: experts below delta rules repeat their rounding."""


@pytest.mark.parametrize(
    ("name", "engine_name"),
    [*((name, "fsdp2") for name in MODELS), *((name, "torchtitan") for name in BUILT_BY_TORCHTITAN)],
)
def test_logprobs_gradients_and_names_are_those_of_transformers(tmp_path: Path, name: str, engine_name: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    assert_as_transformers(model, engine_name, bound=BOUNDS.get(name, 1e-5), unbounded=DECAYS)


def test_every_family_is_in_the_documented_table() -> None:
    engines = table_of_architectures(ROOT / "plugins" / "families" / "README.md")
    assert {name for name, cell in engines.items() if "fsdp2" in cell} == {*engines}
    assert {*engines} == {name for name, _ in MODELS.values()}
    titan = {MODELS[name][0] for name in BUILT_BY_TORCHTITAN}
    assert {name for name, cell in engines.items() if "torchtitan" in cell} == titan
