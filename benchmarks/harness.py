"""What the benchmarks share: their options, their models, and the JSON object that each prints on its last line."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.system.hardware import has_amx, has_fast_bfloat16

REPOSITORY = Path(__file__).resolve().parent.parent
_ISA_CAPS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Variables that keep oneDNN and PyTorch from using instructions that the CPU has."""


def parser(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `quick` says what `--quick` leaves out."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = result.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=quick)
    size.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny random model and a single round: shows that the script works; its figures mean nothing",
    )
    return result


@contextmanager
def benchmark_model(*, smoke: bool) -> Generator[Path]:
    """The directory of SmolLM2-135M-Instruct, or of a tiny random Llama that vLLM can serve on the CPU."""
    if not smoke:
        from controller.runs.models import resolve_model

        yield resolve_model("smollm2-135m-instruct")
        return
    from rl.tiny_models import SERVABLE, tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        yield tiny_llama(Path(folder) / "model", **SERVABLE, max_position_embeddings=256)


def vocab_size(model: Path) -> int:
    """Number of tokens that a model knows."""
    return json.loads((model / "config.json").read_text())["vocab_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure and the limit that it must not exceed, or must reach if `at_most` is False."""

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def ok(self) -> bool:
        """Whether the bar is met; never if the value is NaN."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def print_result(benchmark: str, bars: Sequence[Bar], figures: Mapping[str, object]) -> None:
    """Prints a benchmark's last line."""
    result = {
        "benchmark": benchmark,
        "bars": [{**asdict(bar), "ok": bar.ok} for bar in bars],
        "figures": figures,
        "machine": machine(),
        "commit": _commit(),
    }
    print(json.dumps(result), flush=True)


def machine() -> dict[str, Any]:
    """The machine that a figure belongs to: CPU, usable cores, kind (of `results_page.KINDS`), and caps in force."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kind": ("amx" if has_amx() else "bf16") if has_fast_bfloat16() else "fp32",
        "isa_caps": {name: os.environ[name] for name in _ISA_CAPS if name in os.environ},
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    """The processor's name, as Linux knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit that was measured, marked "-dirty" if tracked files other than results have changes.

    "unknown" without git.
    """
    if shutil.which("git") is None:
        return "unknown"
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("diff", "--quiet", "HEAD", "--", ".", ":!benchmarks/results", ":!benchmarks/RESULTS.md").returncode
    return head.stdout.strip() + ("-dirty" if changed else "") if head.returncode == 0 else "unknown"


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def module_of(name: str) -> str:
    """The module of a benchmark of the core, or of the plug-in that has it. Raises ValueError if none has."""
    for file in (REPOSITORY / "benchmarks" / f"{name}.py", *REPOSITORY.glob(f"plugins/*/benchmarks/{name}.py")):
        if file.is_file():
            return ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
    raise ValueError(f"there is no benchmark {name!r}")
