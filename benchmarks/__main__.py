"""Runs every benchmark, one after the other, and rewrites RESULTS.md with their results."""

import datetime
import json
import subprocess
import sys
from typing import Any

from benchmarks.harness import REPOSITORY, parser

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
"""Modules of this package, in the order in which they run by default."""
ON_REQUEST = ("vs_trl",)
"""Modules that run only when named. vs_trl installs another environment and takes most of an hour on a slow machine."""


def main() -> None:
    """Exits with 1 if a benchmark fails, or if a bar is not met outside of `--smoke`."""
    known = (*BENCHMARKS, *ON_REQUEST)
    options_parser = parser(__doc__, quick="under a minute each; does not rewrite RESULTS.md")
    options_parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=f"known: {', '.join(known)}")
    options = options_parser.parse_args()
    unknown = sorted(set(options.names) - set(known))
    if unknown:
        options_parser.error(f"no benchmark {unknown[0]!r}; known: {', '.join(known)}")
    form = ["--quick"] if options.quick else ["--smoke"] if options.smoke else []
    results = [_run(name, form) for name in options.names]
    if not form and set(options.names) >= set(BENCHMARKS):
        (REPOSITORY / "benchmarks" / "RESULTS.md").write_text(table(results))
    missed = [bar["name"] for result in results for bar in result["bars"] if not bar["ok"]]
    if missed and not options.smoke:
        raise SystemExit(f"bars not met: {', '.join(missed)}")


def _run(name: str, form: list[str]) -> dict[str, Any]:
    """Runs one benchmark, passes on its output, and returns the result on its last line."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *form]
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


def table(results: list[dict[str, Any]]) -> str:
    """RESULTS.md: a table of all bars, then a table of figures per benchmark."""
    lines = [
        "# Results",
        "",
        f"Written by `make bench` on {datetime.date.today().isoformat()}. Medians; ratios are taken within one run.",
        "",
        "What the recipes learned is in [LEARNING.md](LEARNING.md), which is written by hand.",
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
            f"`python -m benchmarks.{result['benchmark']}` at commit {result['commit']}, {_kind(machine)}.",
            "",
            "| figure | value |",
            "|---|---|",
        ]
        for name, value in result["figures"].items():
            lines.append(f"| {name} | {f'{value:.4g}' if isinstance(value, float) else value} |")
    return "\n".join(lines) + "\n"


def _kind(machine: dict[str, Any]) -> str:
    """One line on a machine."""
    caps = "".join(f", {name}={value}" for name, value in machine["isa_caps"].items())
    bfloat16 = "with" if machine["bfloat16"] else "without"
    return (
        f"{machine['cores']} cores of {machine['cpu']} ({bfloat16} bfloat16 instructions{caps}), Python "
        f"{machine['python']}"
    )


if __name__ == "__main__":
    main()
