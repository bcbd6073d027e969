"""The benchmark of this plug-in runs in its smallest form."""

import pytest

from tests.benchmarks.smallest_form import check_smallest_form


@pytest.mark.slow
def test_smallest_form() -> None:
    check_smallest_form("bitwise_step")
