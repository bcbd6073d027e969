"""Mixed precision in one process: bfloat16 compute copies, and float32 master weights that accumulate and step.

Does what FSDP's `MixedPrecisionPolicy` does, for a model that is not sharded. FSDP casts every parameter in every
forward pass; here the copies are recast once per optimizer step.
"""

from typing import Protocol

import torch
from torch import nn


class MasterWeights(Protocol):
    """The float32 parameters of a model that computes with other ones."""

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the parameters to `device`. The model is of use only while that is `compute_device`."""
        ...

    def refresh(self) -> None:
        """Gives the model the values of the parameters, which have changed."""
        ...


class MixedPrecision:
    """The float32 master weights of a model that computes in another dtype."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype) -> None:
        """Turns `model`'s float32 parameters into `compute_dtype` copies, whose gradients go to the master weights."""
        self._copies = list(model.parameters())
        self.master_weights = [nn.Parameter(parameter.data) for parameter in self._copies]
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            copy.data = master.data.to(compute_dtype)
            copy.register_post_accumulate_grad_hook(_Accumulate(master))

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the master weights to `device`. The copies exist only while that is `compute_device`."""
        for copy, master in zip(self._copies, self.master_weights, strict=True):
            master.data = master.data.to(device)
            copy.data = master.data.to(copy.dtype) if device == compute_device else copy.data.new_empty(0)

    def refresh(self) -> None:
        """Recasts the copies after the master weights changed."""
        with torch.no_grad():
            for copy, master in zip(self._copies, self.master_weights, strict=True):
                copy.copy_(master)


class _Accumulate:
    """Adds a copy's gradient to its master weight's as soon as the backward pass has computed it, and frees it."""

    def __init__(self, master: nn.Parameter) -> None:
        self._master = master

    def __call__(self, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if self._master.grad is None:
            self._master.grad = copy.grad.float()
        else:
            self._master.grad.add_(copy.grad)
        copy.grad = None
