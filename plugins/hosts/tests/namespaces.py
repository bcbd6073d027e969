"""Several hosts on this machine, for tests: see `plugins/hosts/benchmarks/simulated_hosts.py`."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from plugins.hosts.benchmarks.simulated_hosts import PORT, Hosts, simulated_hosts, why_not

__all__ = ["PORT", "Hosts", "hosts_on_one_machine", "why_not"]


@contextmanager
def hosts_on_one_machine(*names: str, own_folders: Sequence[Path] = ()) -> Generator[Hosts]:
    """`simulated_hosts`. Skips the test where namespaces cannot be made."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with simulated_hosts(*names, own_folders=own_folders) as hosts:
        yield hosts
