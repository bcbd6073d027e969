"""Runs every benchmark, one after the other, and rewrites RESULTS.md from what they print."""

import argparse
import datetime
import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import REPOSITORY

BENCHMARKS = (
    "step",
    "weight_sync",
    "weight_growth",
    "generation_throughput",
    "inflight_updates",
    "trainer_throughput",
    "layouts",
    "split_invariance",
    "async_speedup",
)
"""Modules of this package, in the order in which they run."""
ON_REQUEST = ("vs_trl",)
"""Run only when named: it installs another environment, and takes most of an hour on a slow machine."""


def main() -> None:
    """Exits with 1 when a benchmark fails or a bar is not met."""
    known = (*BENCHMARKS, *ON_REQUEST)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=f"which; known: {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="under a minute each; does not rewrite RESULTS.md")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    results = [_run(name, quick=options.quick) for name in options.names]
    if not options.quick and set(options.names) >= set(BENCHMARKS):
        (REPOSITORY / "benchmarks" / "RESULTS.md").write_text(_table(results))
    missed = [bar["name"] for result in results for bar in result["bars"] if not bar["ok"]]
    if missed:
        raise SystemExit(f"bars not met: {', '.join(missed)}")


def _run(name: str, *, quick: bool) -> dict[str, Any]:
    """Runs one benchmark, showing what it prints, and returns its last line."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    print(f"== {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    if process.wait() != 0:
        raise SystemExit(f"benchmark {name} failed with status {process.returncode}")
    return json.loads(last)


def _table(results: list[dict[str, Any]]) -> str:
    """RESULTS.md: one table of bars, one of figures per benchmark."""
    lines = [
        "# Results",
        "",
        f"Written by `make bench` on {datetime.date.today().isoformat()}. Medians; ratios are taken within one run.",
        "",
        "What the recipes learned is in [LEARNING.md](LEARNING.md), which is written by hand.",
        "",
        "| benchmark | bar | value | limit | met |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        for bar in result["bars"]:
            sign = "<=" if bar["at_most"] else ">="
            met = "yes" if bar["ok"] else "**no**"
            lines.append(
                f"| {result['benchmark']} | {bar['name']} | {bar['value']:.4g} | {sign} {bar['limit']:g} | {met} |"
            )
    for result in results:
        machine = result["machine"]
        lines += [
            "",
            f"## {result['benchmark']}",
            "",
            f"`python -m benchmarks.{result['benchmark']}` at commit {result['commit']}, {machine['cores']} cores of "
            f"{machine['cpu']}, Python {machine['python']}.",
            "",
            "| figure | value |",
            "|---|---|",
        ]
        for name, value in result["figures"].items():
            lines.append(f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
