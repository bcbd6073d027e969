"""The benchmarks of this plug-in run in their smallest form."""

import pytest

from plugins.hosts.benchmarks.simulated_hosts import why_not
from tests.benchmarks.smallest_form import check_smallest_form


@pytest.mark.slow
@pytest.mark.parametrize("name", ["changed_weights", "hosts", "host_failures"])
def test_smallest_form(name: str) -> None:
    if name != "changed_weights" and (reason := why_not()) is not None:
        pytest.skip(reason)
    check_smallest_form(name)
