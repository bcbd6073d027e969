"""The checks of `make gpu-check`: which there are, what each needs, and how one is run."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.harness import REPOSITORY

Outcome = Literal["passed", "failed", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One module that prints a benchmark's result on its last line, or pytest."""

    name: str
    what: str
    """What it shows, as a sentence."""
    module: str
    options: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ("--smoke",)
    """Options in place of `options` where the figures mean nothing, as on a CPU."""
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    limit_s: float = 120.0


CHECKS = (
    Check(
        name="tests",
        what="The tests marked `gpu` pass.",
        module="pytest",
        options=("-q", "-m", "gpu", "-p", "no:xdist", "tests"),
        smoke=("-q", "-m", "gpu", "-p", "no:xdist", "tests"),
        needs=("pytest", "xdist"),
    ),
    Check(
        name="numerics",
        what="Losses, gradients and checkpoints of every engine are the CPU's.",
        module="benchmarks.gpu.numerics",
        limit_s=150.0,
    ),
    Check(
        name="utilisation",
        what="A 1.7B Qwen3 computes at a good part of the matrix peak, and faster than a transformers loop.",
        module="benchmarks.gpu.utilisation",
        limit_s=240.0,
    ),
    Check(
        name="placement",
        what="Trainer and generator on the same GPU take turns, and agree about every token.",
        module="benchmarks.gpu.placement",
        needs=("monarch", "torchstore", "vllm"),
        limit_s=150.0,
    ),
    Check(
        name="weight_sync",
        what="Weights reach the generator soon after a push.",
        module="benchmarks.weight_sync",
        options=("--quick",),
        needs=("monarch", "torchstore", "vllm"),
    ),
    Check(
        name="generation_throughput",
        what="Sampling through the handle is as fast as vLLM offline.",
        module="benchmarks.generation_throughput",
        options=("--quick",),
        needs=("monarch", "torchstore", "vllm"),
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to."""

    check: Check
    outcome: Outcome
    why: str = ""
    """Why it failed or was left out."""
    bars: Sequence[Mapping[str, Any]] = ()
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])


def missing_packages(check: Check) -> list[str]:
    """The packages that a check needs and that are not installed."""
    return [name for name in check.needs if importlib.util.find_spec(name) is None]


def run_check(check: Check, *, smoke: bool, tell: Callable[[str], None] = print) -> Finding:
    """Runs a check and passes its output on, line by line. A check that outlives its limit is killed, and has failed.

    The bars of a run with `smoke` are those of a tiny model, and are not judged.
    """
    if missing := missing_packages(check):
        return Finding(check, "left out", f"needs {', '.join(missing)}")
    command = [sys.executable, "-m", check.module, *(check.smoke if smoke else check.options)]
    last = ""
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=check.limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        tell(output.decode(errors="replace") if isinstance(output, bytes) else output)
        return Finding(check, "failed", f"did not end within {check.limit_s:g} s")
    for line in done.stdout.splitlines():
        tell(line)
        last = line
    if check.module == "pytest":
        # 5: no test was collected or all were deselected, as where there is no GPU and all are skipped it is 0
        return Finding(check, "passed" if done.returncode == 0 else "failed", last)
    if done.returncode != 0:
        return Finding(check, "failed", f"ended with status {done.returncode}")
    result = json.loads(last)
    missed = [bar["name"] for bar in result["bars"] if not bar["ok"]]
    outcome: Outcome = "failed" if missed and not smoke else "passed"
    why = f"missed {', '.join(missed)}" if outcome == "failed" else ""
    return Finding(check, outcome, why, result["bars"], result["figures"])
