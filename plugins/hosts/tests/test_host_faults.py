"""The cells of the benchmark `host_failures` cover what they promise."""

import itertools
from typing import get_args

from plugins.hosts.benchmarks.on_hosts import HostKind, HostPhase, covering_host_faults


def test_every_kind_meets_every_phase_and_role_on_hosts() -> None:
    cells = covering_host_faults()
    meetings = [(cell.kind, cell.phase) for cell in cells]
    assert sorted(meetings) == sorted(itertools.product(get_args(HostKind), get_args(HostPhase)))
    hurt = [cell for cell in cells if cell.kind != "controller killed"]
    assert {cell.host for cell in cells if cell not in hurt} == {"ctl"}
    for field, choices in (("kind", get_args(HostKind)), ("phase", get_args(HostPhase))):
        for value in set(choices) - {"controller killed"}:
            hosts = {cell.host for cell in hurt if getattr(cell, field) == value}
            assert "h3" in hosts, value
            assert hosts & {"h1", "h2"}, value
    assert {cell.host for cell in hurt} == {"h1", "h2", "h3"}
