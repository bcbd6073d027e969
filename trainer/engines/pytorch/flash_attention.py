"""Which FlashAttention computes packed rows on an NVIDIA GPU: the fastest that this GPU can run and that is installed.

FlashAttention 2 is part of torch. FlashAttention 3 (Hopper, https://arxiv.org/abs/2407.08608) and 4 (Blackwell) are
packages of their own, which the registries do not have for every torch, so neither is required.
"""

import importlib.util
from collections.abc import Callable
from functools import cache

import torch

_FASTER: tuple[tuple[str, tuple[int, int], str], ...] = (
    ("FA4", (10, 0), "flash_attn.cute.interface"),
    ("FA3", (9, 0), "flash_attn_interface"),
)
"""Implementations as torch names them, the least compute capability of each, and the module that it needs."""


def choose_flash_attention(
    capability: tuple[int, int], has_module: Callable[[str], bool]
) -> tuple[str | None, str | None]:
    """The implementation for a GPU, None for torch's own, and a sentence on a faster one that is not installed."""
    advice: str | None = None
    for name, least, module in _FASTER:
        if capability < least:
            continue
        if has_module(module):
            return name, advice
        advice = advice or f"{name} would be faster on this GPU; it needs the module {module}, which is not installed"
    return None, advice


@cache
def installed_flash_attention() -> str | None:
    """The implementation for this machine's GPU, in torch's terms; None for torch's own, or without a GPU.

    Says once, in the trainer's log, which one runs.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    name, advice = choose_flash_attention(torch.cuda.get_device_capability(), _has_module)
    print(f"attention: {name or 'FA2, of torch'}" + (f" ({advice})" if advice else ""), flush=True)
    return name


def _has_module(name: str) -> bool:
    """Whether a module can be imported. Imports the packages above it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
