"""The accumulated gradient of an engine's parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Gradients:
    """Keeps each gradient in `parameter.grad`, or apart from its parameter while they are on different devices.

    torch refuses a `parameter.grad` on another device than the parameter's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters` by any name."""
        self._parameters = parameters
        self._detached: dict[str, Tensor] = {}

    @property
    def exist(self) -> bool:
        """Whether any parameter has a gradient."""
        return bool(self._detached) or any(parameter.grad is not None for parameter in self._parameters.values())

    def clear(self) -> None:
        """Drops all gradients."""
        self._detached = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def detach(self) -> None:
        """Takes the gradients off their parameters, so that either can be moved."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._detached[name] = parameter.grad
                parameter.grad = None

    def to(self, device: torch.device) -> None:
        """Moves detached gradients."""
        self._detached = {name: grad.to(device) for name, grad in self._detached.items()}

    def attach(self) -> None:
        """Puts detached gradients back into `parameter.grad`. They must be on the parameters' device."""
        for name, grad in self._detached.items():
            self._parameters[name].grad = grad
        self._detached = {}

    def attached(self) -> dict[str, Tensor | None]:
        """The present `grad` of every parameter, by name."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def restore(self, earlier: Mapping[str, Tensor | None]) -> None:
        """Replaces the gradients by those that `attached` returned."""
        for name, parameter in self._parameters.items():
            parameter.grad = earlier[name]

    def add(self, earlier: Mapping[str, Tensor | None]) -> None:
        """Adds the gradients that `attached` returned to those accumulated since."""
        for name, parameter in self._parameters.items():
            grad = earlier[name]
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
