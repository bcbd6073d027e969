"""The results that are kept, and RESULTS.md, the page made of them.

`results/<kind>/<benchmark>.json` holds the last line of a benchmark's latest full run on one kind of processor, one of
`KINDS`. So a run replaces its own figures, and the other kinds' stay.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, module_of

FOLDER = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "benchmarks" / "RESULTS.md"
KINDS = {
    "bf16": "with fast bfloat16 instructions",
    "fp32": "without fast bfloat16 instructions",
    "amx": "with matrix units for bfloat16",
}
"""Kind of processor -> what it has, in words."""
_HEAD = """# Results

Written by `make bench`, or `python -m benchmarks NAME`, from `results/`. Figures are medians, and ratios are taken
within one run, with both sides in turns. The columns are kinds of processor: with fast vector instructions for
bfloat16, without them, and with matrix units for bfloat16 (AMX). Where limits differ, they stand in the order of the
columns that were measured. Each section names the command, the commit and the machine of its figures. What was tried
and did not help, and what the recipes learned, is in [LEARNING.md](LEARNING.md), which is written by hand.

| benchmark | bar | limit | bf16 | fp32 | amx |
|---|---|---|---|---|---|"""


def save(result: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Keeps a benchmark's result in the place of an earlier one of this kind of processor."""
    file = folder / result["machine"]["kind"] / f"{result['benchmark']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


def page(names: Iterable[str], folder: Path = FOLDER) -> str:
    """RESULTS.md: a table of all bars, then a section for each benchmark, in the order of `names`."""
    kept = {
        name: {
            kind: json.loads(file.read_text()) for kind in KINDS if (file := folder / kind / f"{name}.json").is_file()
        }
        for name in names
    }
    bars = [line for name, results in kept.items() for line in _bars(name, results)]
    sections = [line for results in kept.values() if results for line in _section(results)]
    return "\n".join([_HEAD, *bars, *sections]) + "\n"


def _bars(name: str, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each bar of one benchmark; `results` has one result for each kind of processor."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for kind, result in results.items():
        for bar in result["bars"]:
            found.setdefault(bar["name"], {})[kind] = bar
    lines: list[str] = []
    for bar_name, by_kind in found.items():
        limits = [f"{'<=' if bar['at_most'] else '>='} {bar['limit']:g}" for bar in by_kind.values()]
        limits = limits[:1] if len(set(limits)) == 1 else limits
        values = " | ".join(_value(by_kind.get(kind)) for kind in KINDS)
        lines.append(f"| {name} | {bar_name} | {', '.join(limits)} | {values} |")
    return lines


def _value(bar: Mapping[str, Any] | None) -> str:
    """A bar's value on one kind of processor."""
    if bar is None:
        return "not measured"
    return f"{bar['value']:.4g}" if bar["ok"] else f"**{bar['value']:.4g}, not met**"


def _section(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The figures of one benchmark, a table for each kind of processor."""
    first = next(iter(results.values()))
    lines = ["", f"## {first['benchmark']}"]
    for result in results.values():
        command = result.get("command") or f"python -m {module_of(result['benchmark'])}"
        lines += ["", f"`{command}` at commit {result['commit']}, {_machine(result['machine'])}.", ""]
        lines += ["| figure | value |", "|---|---|"]
        lines += [f"| {name} | {_figure(value)} |" for name, value in result["figures"].items()]
    return lines


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_figure(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _machine(machine: Mapping[str, Any]) -> str:
    """One line on a machine."""
    caps = "".join(f", {name}={value}" for name, value in machine["isa_caps"].items())
    return f"{machine['cores']} cores of {machine['cpu']} ({KINDS[machine['kind']]}{caps}), Python {machine['python']}"
