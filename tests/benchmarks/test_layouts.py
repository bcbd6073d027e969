"""Every way to split the work gives the same gradient: the layouts of `benchmarks.layouts`, some of them each time."""

from collections.abc import Mapping

import pytest

from benchmarks.layouts import DECAY_LIMIT, LAYOUTS, LIMIT, measure

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

# Those that `test_sharded_engine.py` does not run; all of two ranks, so that they share their processes.
FAST = (
    "tp 2 without sp",
    "cp 2",
    "pp 2 interleaved",
    "critic fsdp 2",
    "critic tp 2",
    "critic cp 2",
    "critic pp 2",
)


def assert_within_limit(errors: Mapping[str, float]) -> None:
    """`errors` is what `measure` returns."""
    limits = {name: DECAY_LIMIT if name.endswith("decays") else LIMIT for name in errors}
    assert {name: error for name, error in errors.items() if not error <= limits[name]} == {}


def test_gradients_of_fast_layouts_equal_those_of_one_rank() -> None:
    errors = measure([layout for layout in LAYOUTS if layout.name in FAST])
    assert errors.keys() == {*FAST}
    assert_within_limit(errors)


def test_gradients_of_all_layouts_equal_those_of_one_rank() -> None:
    assert_within_limit(measure(LAYOUTS))
