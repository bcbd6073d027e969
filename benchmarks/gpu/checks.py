"""The checks of `make gpu-check`: which there are, what each needs, and how one is run."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.harness import REPOSITORY

Outcome = Literal["passed", "failed", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One module that prints a benchmark's result on its last line, or pytest.

    Limits are of a machine that has compiled none of the kernels before.
    """

    name: str
    what: str
    """The result of a check, as a sentence."""
    module: str
    options: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ("--smoke",)
    """Options in place of `options` where the figures mean nothing, as on a CPU."""
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    limit_s: float = 240.0


def gpu_test_files() -> list[str]:
    """The files with tests marked `gpu`: the others may need packages that are not there to be collected."""
    files = sorted([*(REPOSITORY / "tests").rglob("test_*.py"), *REPOSITORY.glob("plugins/*/tests/**/test_*.py")])
    return [str(file.relative_to(REPOSITORY)) for file in files if "pytest.mark.gpu\n" in file.read_text()]


CHECKS = (
    Check(
        name="tests",
        what="The tests marked `gpu` pass.",
        module="pytest",
        options=("-v", "-m", "gpu", "-p", "no:xdist", *gpu_test_files()),
        smoke=("-q", "-m", "gpu", "-p", "no:xdist", *gpu_test_files()),
        needs=("pytest", "xdist"),
        limit_s=600.0,
    ),
    Check(
        name="numerics",
        what="Losses, gradients and checkpoints of every engine are the CPU's.",
        module="benchmarks.gpu.numerics",
        limit_s=300.0,
    ),
    Check(
        name="utilisation",
        what="A 1.7B Qwen3 computes at a good part of the matrix peak, and faster than a transformers loop.",
        module="benchmarks.gpu.utilisation",
        limit_s=210.0,
    ),
    Check(
        name="weights",
        what="A push and a pull from GPU to GPU take at most five copies within a GPU.",
        module="benchmarks.gpu.weights",
        limit_s=90.0,
    ),
    Check(
        name="placement",
        what="Trainer and generator on the same GPU take turns, and agree about every token.",
        module="benchmarks.gpu.placement",
        needs=("monarch", "torchstore", "vllm"),
        limit_s=300.0,
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


def run_check(check: Check, *, smoke: bool, left_s: float = math.inf, tell: Callable[[str], None] = print) -> Finding:
    """Runs a check for at most `left_s` seconds and passes its output on at its end.

    A check that outlives its limit is killed with all its processes, which would keep the GPU's memory, and has failed.
    The bars of a run with `smoke` are those of a tiny model, and are not judged.
    """
    if missing := missing_packages(check):
        return Finding(check, "left out", f"needs {', '.join(missing)}")
    limit_s = min(check.limit_s, left_s)
    if limit_s <= 0:
        return Finding(check, "left out", "no time was left")
    status, output, errors = _run(
        [sys.executable, "-m", check.module, *(check.smoke if smoke else check.options)], limit_s
    )
    tell(output + errors)
    if status is None:
        return Finding(check, "failed", f"did not end within {limit_s:g} s")
    if check.module == "pytest":
        # pytest is content if all tests are skipped, as they are where torch finds no GPU.
        passed = status == 0 and (smoke or " passed" in _last_line(output))
        return Finding(check, "passed" if passed else "failed", _last_line(output))
    if status != 0:
        return Finding(check, "failed", f"ended with status {status}: {_last_line(errors)}".removesuffix(": "))
    return _judged(check, _last_line(output), smoke=smoke)


def _judged(check: Check, line: str, *, smoke: bool) -> Finding:
    """What a check came to whose last line of output this is."""
    try:
        result = json.loads(line)
        bars, figures = result["bars"], result["figures"]
    except (ValueError, KeyError, TypeError):
        return Finding(check, "failed", f"its last line is {line!r}, which is no result")
    missed = [bar["name"] for bar in bars if not bar["ok"]]
    outcome: Outcome = "failed" if missed and not smoke else "passed"
    return Finding(check, outcome, f"missed {', '.join(missed)}" if outcome == "failed" else "", bars, figures)


def _run(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Exit status, output and errors; the status is None if the limit came first."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    )
    status: int | None = None
    try:
        output, errors = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return status, output, errors


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
