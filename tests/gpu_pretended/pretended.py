"""The environment of a process that sees pretended GPUs."""

import os
from pathlib import Path
from typing import Literal

from tests.gpu_pretended.build import ENVIRONMENT, LIBRARIES

PYTHON = ENVIRONMENT / "bin" / "python"
STARTUP = Path(__file__).parent / "startup"
Mode = Literal["computed", "memory", "kernels"]


def environment(mode: Mode, *, gpus: int = 1, gib: float = 80.0, table: Path | None = None) -> dict[str, str]:
    """`computed`: device.py computes. `memory`: nothing is computed, and a group of ranks is faked by rank 0.

    `kernels`: compilers run, and the kernels that they make are launched into nothing.
    """
    libraries = LIBRARIES / ("empty" if mode == "kernels" else "computed")
    ours = {
        "PRETENDED_GPU": "" if mode == "kernels" else mode,
        "PRETENDED_GPUS": str(gpus),
        "PRETENDED_GPU_GB": str(gib),
        "LD_PRELOAD": str(libraries / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": str(STARTUP),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {**os.environ, **ours, **({} if table is None else {"PRETENDED_GPU_TABLE": str(table)})}
