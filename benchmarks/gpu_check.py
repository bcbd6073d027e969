"""Proves the GPU path on the machine at hand: `make gpu-check`, or python -m benchmarks.gpu_check.

    python -m benchmarks.gpu_check [--device gpu | cpu] [--only NAME ...] [--page FILE] [--minutes N]

Runs every `gpu` test, compares each engine with the CPU's numbers, and measures what has a bar on a GPU. A check whose
packages are not installed is left out, and said: without vLLM everything of the trainer still runs. So is a check for
which no time is left. Each bar is printed as one JSON line, and RESULTS-gpu.md, with the machine's name, is written
after every check. `--device cpu` runs the same checks with a tiny model on the CPU, which shows that they work;
the figures mean nothing then, and the table is printed if `--page` does not say where it goes.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CHECKS, Finding, run_check
from benchmarks.harness import REPOSITORY, machine

PAGE = REPOSITORY / "benchmarks" / "RESULTS-gpu.md"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the checks. Exits with 1 if one has failed, and with 2 for a mistake of the caller."""
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--page", type=Path, help="where the table goes; with --device gpu by default RESULTS-gpu.md")
    parser.add_argument("--minutes", type=float, default=35.0, help="time for all checks together (default: 35)")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "gpu"
    gpus = gpu_names()
    if on_gpu and not gpus:
        parser.error("this machine has no CUDA device; --device cpu runs the checks with a tiny model on the CPU")
    page: Path | None = options.page or (PAGE if on_gpu else None)
    findings: list[Finding] = []
    table = ""
    started = time.monotonic()
    for check in (check for check in CHECKS if check.name in options.only):
        print(f"== {check.name}: {check.what}", flush=True)
        left_s = options.minutes * 60 - (time.monotonic() - started)
        finding = run_check(check, smoke=not on_gpu, left_s=left_s)
        findings.append(finding)
        print(f"{check.name}: {finding.outcome} {finding.why}".rstrip())
        for bar in finding.bars:
            print(json.dumps({"check": check.name, **bar}), flush=True)
        table = as_page(findings, {**machine(), "gpus": gpus}, time.monotonic() - started)
        if page is not None:
            page.write_text(table)
    if page is None:
        print(table)
    if any(finding.outcome == "failed" for finding in findings):
        raise SystemExit(1)


def gpu_names() -> list[str]:
    """The CUDA devices of this machine by name."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def as_page(findings: Sequence[Finding], machine: Mapping[str, Any], seconds: float) -> str:
    """RESULTS-gpu.md: what was run where, the bars, and the figures beside them."""
    where = ", ".join(machine["gpus"]) or f"{machine['cpu']} (no GPU: a tiny model, whose figures mean nothing)"
    lines = [
        "# Results on GPUs",
        "",
        f"`make gpu-check` on {where}, Python {machine['python']}, {seconds:.0f} s.",
        "",
        "| check | outcome | bar | value | limit |",
        "|---|---|---|---|---|",
    ]
    for finding in findings:
        said = f"{finding.outcome}: {finding.why}" if finding.why else finding.outcome
        rows = [
            (bar["name"], f"{bar['value']:.4g}", f"{'at most' if bar['at_most'] else 'at least'} {bar['limit']:g}")
            for bar in finding.bars
        ]
        lines += [f"| {finding.check.name} | {said} | {' | '.join(row)} |" for row in rows or [("", "", "")]]
    lines += ["", "## Figures", ""]
    for finding in findings:
        for name, value in finding.figures.items():
            lines.append(
                f"* {finding.check.name}: {name} {value:.4g}"
                if isinstance(value, float)
                else f"* {finding.check.name}: {name} {value}"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
