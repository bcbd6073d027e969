"""Which sandboxes this host has, for the tests."""

import pytest

from ownloop_sandbox import Sandbox, find_way

REAL: tuple[Sandbox, ...] = ("bubblewrap", "namespaces")


def need(sandbox: Sandbox) -> None:
    """Skips the test, with the reason, if this host has no such sandbox."""
    try:
        find_way(sandbox)
    except ValueError as error:
        pytest.skip(str(error).partition(". Install")[0])
