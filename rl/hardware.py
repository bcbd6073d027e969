"""What the processor computes fast, for recipes that are for any CPU."""

from pathlib import Path
from typing import Literal

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Intel and AMD; Intel; Arm


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> Literal["bfloat16", "float32"]:
    """bfloat16 on a processor with instructions for it, by Linux's list of its features; float32 on any other.

    Without them a bfloat16 matrix product goes through scalar code: a step of SmolLM2-135M takes ten times as long as
    in float32.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "float32"
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return "bfloat16" if _BFLOAT16_FLAGS.intersection(features.split()) else "float32"
