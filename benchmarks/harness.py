"""What every benchmark prints: a JSON object on its last line, with its bars and the machine it ran on."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure that must not be above (or below) a limit."""

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def ok(self) -> bool:
        """Whether the bar is met. A value that is not a number meets none."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def print_result(benchmark: str, bars: Sequence[Bar], figures: Mapping[str, object]) -> None:
    """Prints the benchmark's last line."""
    result = {
        "benchmark": benchmark,
        "bars": [{**asdict(bar), "ok": bar.ok} for bar in bars],
        "figures": figures,
        "machine": {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "commit": _commit(),
    }
    print(json.dumps(result), flush=True)


def _cpu_model() -> str:
    """The processor's name, as Linux knows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit that was measured, marked if the tree had other changes."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
