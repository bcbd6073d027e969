"""Mixed precision in one process: bfloat16 parameters to compute with, float32 ones to accumulate into and to step.

Does what FSDP's `MixedPrecisionPolicy` does, for the case that nothing is sharded, without its cast of every parameter
in every forward pass: the copies are refreshed once per optimizer step.
"""

import torch
from torch import nn


class MixedPrecision:
    """The float32 masters of a model that computes in another dtype."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        """Turns `model`'s float32 parameters into `compute_dtype` copies; their gradients go to the masters."""
        self._copies = list(model.parameters())
        self.master_weights = [nn.Parameter(parameter.data) for parameter in self._copies]
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            copy.data = master.data.to(compute_dtype)
            copy.register_post_accumulate_grad_hook(_Accumulate(master))

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the masters. The copies are dropped elsewhere than on `compute_device`, and made anew there."""
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            master.data = master.data.to(device)
            copy.data = master.data.to(copy.dtype) if device == compute_device else copy.data.new_empty(0)

    def refresh(self) -> None:
        """Makes the copies equal to the masters again, after these have changed."""
        with torch.no_grad():
            for copy, master in zip(self._copies, self.master_weights, strict=True):
                copy.copy_(master)


class _Accumulate:
    """Moves a copy's gradient to its master as soon as the backward pass has computed it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if self._master.grad is None:
            self._master.grad = copy.grad.float()
        else:
            self._master.grad.add_(copy.grad)
        copy.grad = None
