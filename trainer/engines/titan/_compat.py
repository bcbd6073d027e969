"""Every patch of torchtitan, each with its reason and when it can go.

`prepare_torchtitan` must run before any other torchtitan module is imported; `trainer.engines.titan.model` does that.
"""

import sys

import torch


def prepare_torchtitan() -> None:
    """Makes torchtitan 0.3.0 usable on a machine without an accelerator. Does nothing where there is one."""
    if torch.cuda.is_available():
        return
    assert not any(name.startswith("torchtitan.models") for name in sys.modules), "torchtitan was imported too early"
    import torchtitan.tools.utils as utils

    # Reason: without an accelerator torchtitan assumes "cuda" at import, and its other modules copy the two names.
    # Remove when `get_device_info` falls back to the CPU.
    utils.device_type, utils.device_module = "cpu", torch.cpu
