"""Every way to split the work gives the same gradient: the layouts of `benchmarks.layouts`, some of them each time."""

import pytest

from benchmarks.layouts import DECAY_LIMIT, FAMILIES, LAYOUTS, LIMIT, Layout, measure

pytestmark = pytest.mark.ranks

# Those that `test_sharded_engine.py` does not run; all of two ranks, so that they share their processes.
FAST = (
    "tp 2 without sp",
    "cp 2",
    "pp 2 interleaved",
    "moe cp 2",
    "moe pp 2",
    "ep 2 within tp 2",
    "critic fsdp 2",
    "critic tp 2",
    "critic cp 2",
    "critic pp 2",
    "gpt_oss ep 2 within tp 2",
    "deepseek_v3 ep 2 within tp 2",
    "deepseek_v3 fsdp 2 recomputed",
    "glm4_moe cp 2",
    "qwen3_5 tp 2",
)


def assert_within_limit(layouts: list[Layout]) -> None:
    errors = measure(layouts)
    assert errors.keys() >= {layout.name for layout in layouts}
    limits = {name: DECAY_LIMIT if name.endswith("decays") else LIMIT for name in errors}
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}


@pytest.mark.slow
def test_gradients_of_fast_layouts_equal_those_of_one_rank() -> None:
    assert_within_limit([layout for layout in (*LAYOUTS, *FAMILIES) if layout.name in FAST])


@pytest.mark.slow
def test_gradients_of_all_layouts_equal_those_of_one_rank() -> None:
    assert_within_limit([*LAYOUTS, *FAMILIES])
