"""Comparisons that say in words what differs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.engines.base import Engine
from trainer.engines.contract.plain_ranks import relative_error


class ContractError(AssertionError):
    """An engine does not keep its contract. The message says what was compared and by how much it differs."""


def require(condition: bool, message: str) -> None:
    """Raises ContractError with the message unless the condition holds."""
    if not condition:
        raise ContractError(message)


def gradients(engine: Engine) -> dict[str, Tensor]:
    """A copy of every gradient of this rank, by Hugging Face name."""
    return {name: p.grad.clone() for name, p in engine.hf_parameters() if p.grad is not None}


def parameters(engine: Engine) -> dict[str, Tensor]:
    """A copy of every parameter of this rank, by Hugging Face name."""
    return {name: p.detach().clone() for name, p in engine.hf_parameters()}


def require_close(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> float:
    """Returns the worst relative error of any tensor. Raises ContractError if it is above the tolerance."""
    require_names(what, actual, expected)
    errors = {name: _error(actual[name], expected[name]) for name in expected}
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # NaN is the worst
    if not errors[name] <= tolerance:
        raise ContractError(f"{what}: {name} differs by {errors[name]:.1e}; at most {tolerance:.0e} is accepted")
    return errors[name]


def require_equal(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ContractError unless all tensors are the same to the last bit."""
    require_names(what, actual, expected)
    differing = [name for name in expected if not torch.equal(actual[name], expected[name])]
    require(not differing, f"{what}: {len(differing)} of {len(expected)} differ, the first is {(differing or [''])[0]}")


def require_names(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ContractError unless both hold tensors of the same names and shapes."""
    missing, surplus = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or surplus:
        raise ContractError(f"{what}: missing are {missing[:3] or 'none'}, not expected are {surplus[:3] or 'none'}")
    for name, tensor in expected.items():
        if actual[name].shape != tensor.shape:
            raise ContractError(
                f"{what}: {name} has shape {tuple(actual[name].shape)} instead of {tuple(tensor.shape)}"
            )


def _error(actual: Tensor, expected: Tensor) -> float:
    """The relative error, also of zeros."""
    return 0.0 if torch.equal(actual, expected) else relative_error(actual, expected)
