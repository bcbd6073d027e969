"""`ownloop doctor --hosts ROLE=HOST:PORT,... ...`: what hosts are, how fast they reach each other, what would fail."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from controller.commands.command import FAILED, Commands, refuse

if TYPE_CHECKING:
    from controller.hosts.examination import Examination


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("doctor", help="check the hosts of a run before it", allow_abbrev=False)
    parser.add_argument(
        "--hosts",
        nargs="+",
        action="extend",
        required=True,
        metavar="WORD",
        help="as for `ownloop run`: ROLE=HOST:PORT,HOST:PORT ..., or ssh ROLE=HOST,... ...",
    )
    parser.add_argument("--certs", type=Path, help="the folder of this host's certificates")
    parser.add_argument("--mb", type=int, default=64, help="how much each pair of hosts sends (default: 64 MB)")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prints what was found. Returns 1 if something would fail."""
    refuse(overrides)
    from controller.hosts.host_groups import WorkerHosts, parse_hosts, prepare

    hosts = parse_hosts(options.hosts)
    if hosts is None:
        raise ValueError("--hosts is none; name the hosts to examine, for example trainer=HOST:PORT")
    if isinstance(hosts, WorkerHosts):
        hosts = replace(hosts, certs=options.certs)
    elif options.certs is not None:
        raise ValueError(f"--certs is for workers that run already; {options.hosts[0]} makes certificates of its own")
    prepare(hosts)  # before Monarch is imported
    from controller.hosts.examination import examine

    found = asyncio.run(examine(hosts, options.mb << 20))
    for line in report(found):
        print(line)
    return FAILED if found.problems else 0


def report(found: "Examination") -> list[str]:
    """What was found, in lines for a terminal."""
    from controller.hosts.examination import CONTROLLER

    rows = [["host", "worker", "address", "torch", "GPUs", "memory", "clock"]]
    for host in found.hosts:
        facts = host.facts
        gpus = f"{len(facts.gpus)} x {facts.gpu_kind}" if facts.gpus else "none"
        memory, clock = f"{facts.memory_bytes / 1e9:.0f} GB", f"{found.clocks.get(host.name, 0.0):+.3f} s"
        rows.append([host.name, str(host.worker), facts.address, facts.versions["torch"], gpus, memory, clock])
    names = [CONTROLLER, *(host.name for host in found.hosts)]
    speeds = [["MB/s from \\ to", *names]]
    for sender in names:
        rates = [found.bytes_per_s.get((sender, receiver)) for receiver in names]
        speeds.append([sender, *("" if rate is None else f"{rate / 1e6:.0f}" for rate in rates)])
    problems = [f"would fail: {problem}" for problem in found.problems] or ["nothing was found that would fail"]
    return [*_table(rows), "", *_table(speeds), "", *problems]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
