"""Every patch of torchtitan, each with its reason and when it can go.

`prepare_torchtitan` must run before any other torchtitan module is imported; `trainer.engines.titan` sees to it.
"""

import sys

import torch


def prepare_torchtitan() -> None:
    """Makes torchtitan 0.3.0 importable and usable on a machine without an accelerator; with one, does nothing."""
    if torch.cuda.is_available():
        return
    assert not any(name.startswith("torchtitan.models") for name in sys.modules), "torchtitan was imported too early"
    import torchtitan.tools.utils as utils

    # Reason: without an accelerator torchtitan assumes "cuda", once, at import, and other modules copy the names.
    # Remove when `get_device_info` falls back to the CPU.
    utils.device_type, utils.device_module = "cpu", torch.cpu
