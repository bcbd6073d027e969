"""The benchmarks of this plug-in run in their smallest form."""

import pytest

from tests.benchmarks.smallest_form import check_smallest_form


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "published_shapes"])
def test_smallest_form(name: str) -> None:
    check_smallest_form(name)
