"""How fast this rank's device multiplies matrices: the peak that a step's operations are compared with.

A file of the user's cache keeps the best rate of each device, dtype and number of threads. Every start measures again,
because the machine may have been busy the first time.
"""

import json
import os
import platform
import time
from pathlib import Path

import torch

from rl.system.disk import cache_directory
from trainer.engines.pytorch.ranks import DTYPES

_REPEATS = 4
_SIZES = {"cuda": 8192, "cpu": 1024}
_SMALL = 256
_LONGEST_S = 0.1
"""What one product may take. A CPU that emulates a dtype takes longer, and is as fast with small matrices."""


def matrix_rate(device: torch.device, dtype: str, file: Path | None = None) -> float:
    """Operations a second of a large matrix product in `dtype`, the best that was ever measured.

    `file` keeps it, by default `matrix_rates.json` in ownloop's cache. Where that cannot be written, only what is
    measured now counts.
    """
    file = file or cache_directory() / "matrix_rates.json"
    key = f"{_device_name(device)}, {dtype}"
    measured, known = _measure(device, DTYPES[dtype]), _read(file)
    if measured > known.get(key, 0.0):
        _write(file, {**known, key: measured})
    return max(measured, known.get(key, 0.0))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.processor()
    return f"{name} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    size = _SIZES[device.type]
    if device.type == "cpu":
        small = _rate(device, dtype, _SMALL)
        if 2.0 * size**3 / small > _LONGEST_S:
            return small
    return _rate(device, dtype, size)


def _rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations a second of a product of square matrices, the best of some."""
    a, b, product = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    taken: list[float] = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        torch.mm(a, b, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(taken[1:])


def _read(file: Path) -> dict[str, float]:
    try:
        return {str(key): float(rate) for key, rate in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _write(file: Path, rates: dict[str, float]) -> None:
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(rates, indent=2))
        partial.replace(file)
    except OSError:
        return
