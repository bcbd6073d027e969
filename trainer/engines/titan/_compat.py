"""Every patch of torchtitan, each with its reason and when it can go.

`prepare_torchtitan` must run before any other torchtitan module is imported; `trainer.engines.titan.model` does that.
"""

import contextlib
import sys
from collections.abc import Generator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from trainer.engines.pytorch.document_attention import installed_flash_attention

_LOOP = "torchtitan.trainer"


def prepare_torchtitan() -> None:
    """Makes torchtitan 0.3.0 usable without an accelerator, and with no more than torch's own FlashAttention."""
    import torchtitan.tools.utils as utils

    # Reason: torchtitan asks for FlashAttention 3 on every Hopper GPU and for 4 on every Blackwell, installed or not.
    # Remove when it falls back to torch's own.
    utils.get_cuda_flash_attention_impl = installed_flash_attention
    if torch.cuda.is_available():
        return
    assert not any(name.startswith("torchtitan.models") for name in sys.modules), "torchtitan was imported too early"
    # Reason: without an accelerator torchtitan assumes "cuda" at import, and its other modules copy the two names.
    # Remove when `get_device_info` falls back to the CPU.
    utils.device_type, utils.device_module = "cpu", torch.cpu


def compile_attention_untuned() -> None:
    """Has FlexAttention compiled once for rows of any length, with the block sizes that PyTorch chooses for the GPU.

    Reason: in the first steps of a run torchtitan times dozens of variants of the kernel for each new kind of row, and
    compiles kernel and mask once for the first row's length and once for all others.
    Remove when `FlexAttention.Config` has options for it.
    """
    import torchtitan.models.common.attention as attention

    flex = attention.FlexAttention
    flex.inductor_configs |= {"max_autotune": False, "coordinate_descent_tuning": False}
    compiled = torch.compile(attention.flex_attention, dynamic=True, options=flex.inductor_configs)  # pyright: ignore[reportCallIssue, reportArgumentType]
    flex._compiled_flex_attn = staticmethod(compiled)  # pyright: ignore[reportPrivateUsage]
    attention._compiled_create_block_mask = torch.compile(attention.create_block_mask, dynamic=True)  # pyright: ignore[reportPrivateUsage]


@contextlib.contextmanager
def without_torchtitans_loop() -> Generator[None]:
    """Within the block, a module that imports torchtitan's training loop gets a class that nothing is an instance of.

    Reason: a model's `update_from_config` imports the loop, and with it all of `datasets`, only to see whether its
    argument is the loop's configuration. That takes a second of every rank.
    Remove when `update_from_config` in `torchtitan/models/common/decoder.py` does not import `torchtitan.trainer`.
    """
    stand_in: Any = ModuleType(_LOOP)
    stand_in.Trainer = SimpleNamespace(Config=type("Config", (), {}))
    loaded = sys.modules.setdefault(_LOOP, stand_in)
    try:
        yield
    finally:
        if loaded is stand_in:
            del sys.modules[_LOOP]  # the next import gets torchtitan's own
