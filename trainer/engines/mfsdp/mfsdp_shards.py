"""This rank's shards of a model under Megatron-FSDP, as float32 parameters that the optimizer steps.

Megatron-FSDP keeps a sharded buffer of parameters per block, in the dtype of computation; one of float32 parameters, if
that is another; and one of gradients. The parameters here are views of the float32 buffers.
"""

from typing import Any

import torch
from torch import Tensor, nn

_PREFIX = "model."


class MainShards:
    """The `MasterWeights` of a model under Megatron-FSDP."""

    def __init__(self, wrapper: Any) -> None:
        """`wrapper` is Megatron-FSDP's, around a `TransformersPolicy`."""
        self._wrapper = wrapper
        # The parts are flat: most of a rank's parts begin and end within a parameter.
        self._views: dict[str, Tensor] = {
            name.removeprefix(_PREFIX): parameter.detach().to_local().flatten()
            for name, parameter in wrapper.param_and_grad_buffer.optimizer_named_parameters
        }
        self.parameters = {name: nn.Parameter(view) for name, view in self._views.items()}
        self._storage_bytes: dict[torch.UntypedStorage, int] = {}

    def to(self, device: torch.device, compute_device: torch.device) -> None:
        """Moves the parameters to `device`. Megatron-FSDP's buffers hold memory only while that is `compute_device`."""
        if device == compute_device:
            for storage, size_bytes in self._storage_bytes.items():
                storage.resize_(size_bytes)
            self._storage_bytes = {}
            for name, view in self._views.items():
                view.copy_(self.parameters[name].data)
                self.parameters[name].data = view
            self.refresh()
            self._wrapper.zero_grad_buffer()
            return
        for name, view in self._views.items():
            pinned = torch.empty(view.shape, device=device, pin_memory=view.is_cuda)
            self.parameters[name].data = pinned.copy_(view)
        # Without this argument, parameters outside of blocks would stay whole on the device.
        self._wrapper.all_gather_pipeline.reset(preserve_non_fsdp_units=False)
        self._storage_bytes = {storage: storage.nbytes() for storage in self._storages()}
        for storage in self._storage_bytes:
            storage.resize_(0)

    def refresh(self) -> None:
        """Recasts the parameters of computation after the float32 ones changed."""
        self._wrapper.install_optimized_model_weights()

    def take_gradients(self) -> None:
        """Waits until the gradients of a call are summed over ranks, and moves them to the parameters. A collective."""
        ran = self._wrapper.microbatch_count > 0
        self._wrapper.finish_grad_sync()
        if ran:
            for name, parameter in self._wrapper.param_and_grad_buffer.optimizer_named_parameters:
                if parameter.grad is not None:
                    part = self.parameters[name.removeprefix(_PREFIX)]
                    part.grad = parameter.grad.to_local().flatten().clone()
        self._wrapper.zero_grad_buffer()

    def discard(self) -> None:
        """Frees gathered parameters, and gradients that were not taken. A collective."""
        self._wrapper.finish_grad_sync()
        self._wrapper.zero_grad_buffer()

    def _storages(self) -> list[torch.UntypedStorage]:
        """The memory of Megatron-FSDP's sharded buffers."""
        return [
            buffer.data.untyped_storage()
            for group in self._wrapper.param_and_grad_buffer.parameter_groups
            for buffer in (group.model_weight_buffer, group.main_weight_buffer, group.main_grad_buffer)
            if buffer is not None
        ]
