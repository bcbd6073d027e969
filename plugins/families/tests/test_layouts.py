"""As `tests/benchmarks/test_layouts.py`, of models with experts and of families."""

import pytest

from benchmarks.layouts import measure
from plugins.families.benchmarks.layouts_of_families import LAYOUTS, MODELS
from tests.benchmarks.test_layouts import assert_within_limit

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

FAST = (
    "moe cp 2",
    "moe pp 2",
    "ep 2 within tp 2",
    "gpt_oss ep 2 within tp 2",
    "deepseek_v3 ep 2 within tp 2",
    "deepseek_v3 fsdp 2 recomputed",
    "glm4_moe cp 2",
    "qwen3_5 tp 2",
)


def test_gradients_of_fast_layouts_equal_those_of_one_rank() -> None:
    errors = measure([layout for layout in LAYOUTS if layout.name in FAST], MODELS, "fsdp2")
    assert errors.keys() >= {*FAST}
    assert_within_limit(errors)


def test_gradients_of_all_layouts_equal_those_of_one_rank() -> None:
    assert_within_limit(measure(LAYOUTS, MODELS, "fsdp2"))
