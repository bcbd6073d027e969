"""How an engine is compared with what it must equal: what differs is said in words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl.sampling import KeptSets
from rl.tiny_models import VOCAB_SIZE
from rl.types import Datum
from trainer.engines.contract.plain_ranks import relative_error


class ContractError(AssertionError):
    """An engine does not keep its contract. The message says what was compared and by how much it differs."""


def require(condition: bool, message: str) -> None:
    """Raises ContractError with the message unless the condition holds."""
    if not condition:  # its own error: an assertion can be switched off
        raise ContractError(message)


def require_close(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> float:
    """Returns the worst relative error of any tensor. Raises ContractError if it is above the tolerance."""
    require_names(what, actual, expected)
    errors = {name: _error(actual[name], expected[name]) for name in expected}
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))  # NaN is the worst
    if not errors[name] <= tolerance:  # also false for NaN
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
            raise ContractError(  # shapes by name, because values would broadcast
                f"{what}: {name} has shape {tuple(actual[name].shape)} instead of {tuple(tensor.shape)}"
            )


def _error(actual: Tensor, expected: Tensor) -> float:
    """The relative error, also of zeros."""
    return 0.0 if torch.equal(actual, expected) else relative_error(actual, expected)


def size_of_terms(batch: Sequence[Datum], logprobs: Sequence[NDArray[np.float32]]) -> float:
    """Sum of the absolute terms of `importance_sampling`: the terms themselves may nearly cancel each other."""
    terms = [
        datum.weights * np.exp(scored - datum.loss_inputs["logprobs"]) * datum.loss_inputs["advantages"]
        for datum, scored in zip(batch, logprobs, strict=True)
    ]
    return float(sum(np.abs(each).sum() for each in terms))


def sampled_otherwise(batch: Sequence[Datum]) -> list[Datum]:
    """The datums as if sampled at different temperatures, and two of three from a cut distribution.

    The first token of a datum was sampled from the whole vocabulary.
    """
    rng = np.random.default_rng(0)

    def kept(datum: Datum) -> KeptSets:
        cut = [np.flatnonzero(rng.random(VOCAB_SIZE) < rng.random()) for _ in datum.tokens[1:]]
        pairs = zip(cut, datum.loss_inputs["target_tokens"][1:], strict=True)
        return KeptSets.of([[], *(np.union1d(tokens, [target]) for tokens, target in pairs)])

    return [
        replace(datum, temperature=(0.6, 1.0, 1.7)[i % 3], kept=kept(datum) if i % 3 else None)
        for i, datum in enumerate(batch)
    ]
