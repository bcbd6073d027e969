"""Checks, before any process starts, that this host has the hardware and tools that a trainer's options need."""

import importlib.util

from rl.system.hardware import sees_gpu
from trainer.config import TrainerConfig


def check_hardware(config: TrainerConfig, *, has_experts: bool) -> None:
    """Raises ValueError for an option that would fail on this host, naming what is missing and what would work."""
    if config.float8 != "none":
        _check_float8(config)
    if config.compile:
        _check_compile(config, has_experts)


def _check_float8(config: TrainerConfig) -> None:
    import torch  # takes a second to load, and few options need it

    needed, family = ((9, 4), "an AMD GPU") if torch.version.hip else ((8, 9), "an NVIDIA GPU")
    missing = [] if _capability() >= needed else [f"{family} of compute capability {needed[0]}.{needed[1]} or later"]
    if importlib.util.find_spec("torchao") is None:
        missing.append("the package torchao")
    if missing:
        major, minor = _capability()
        found = f"a GPU of compute capability {major}.{minor}" if major else "no GPU"
        raise ValueError(
            f"TrainerConfig.float8 is {config.float8!r}, which needs {' and '.join(missing)}; this host has {found}. "
            f"Without that it must be 'none', which computes in compute_dtype {config.compute_dtype!r}"
        )


def _capability() -> tuple[int, int]:
    if not sees_gpu():
        return (0, 0)
    import torch

    return torch.cuda.get_device_capability()


def _check_compile(config: TrainerConfig, has_experts: bool) -> None:
    if has_experts and config.compute_dtype == "float32":
        raise ValueError(
            "TrainerConfig.compile is True and compute_dtype is 'float32'; torch compiles experts in bfloat16 only, so "
            "compute_dtype must be 'bfloat16', or compile False"
        )
    if sees_gpu():
        return
    if has_experts or config.tensor_parallel > 1:
        reason = "the model has experts" if has_experts else f"tensor_parallel is {config.tensor_parallel}"
        raise ValueError(
            f"TrainerConfig.compile is True and {reason}, which torch does not compile on a host without GPU; compile "
            "must be False, which is as fast on a CPU"
        )
    # Imported here because they take seconds to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "TrainerConfig.compile is True, which needs a C++ compiler on a host without GPU, and CXX names none, nor "
            "is there a g++. Install one (g++ or clang++), or leave compile False, which is as fast on a CPU"
        ) from None
