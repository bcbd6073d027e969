"""What one micro-batch's forward and backward pass computed, small enough to keep, and how two of them differ.

A tensor is kept as a digest of its bytes, which says whether another one is equal, and as norms and sums of 64 pieces,
which say by how much it is not: a rounding, or more.
"""

import contextlib
import functools
import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from rl.losses import Loss
from rl.types import Datum
from trainer.engines.base import Engine

Floats = NDArray[np.float64]
ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
"""Compute dtype -> the largest relative difference that rounding on another processor makes."""
_PIECES = 64
_NUM_SIGNS = 1 << 14


@dataclass(frozen=True, slots=True)
class Summary:
    """A tensor in a few numbers."""

    digest: str
    num_not_finite: int
    pieces: Floats
    """[2, pieces] norm, and sum with random signs, of each piece; numbers that are not finite count as 0. The square of
    such a sum of any vector is, in the mean, the square of its norm: so the sums tell how far two tensors are apart."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Summary":
        """Of a tensor of any shape."""
        flat = tensor.detach().flatten().cpu()
        digest = hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        values = flat.float().numpy()
        is_finite = np.isfinite(values)
        parts = [p for p in np.array_split(np.where(is_finite, values, np.float32(0)), _PIECES) if len(p)]
        pieces = [[float(np.linalg.norm(part.astype(np.float64))) for part in parts], list(map(_signed_sum, parts))]
        bad = len(values) - int(is_finite.sum())
        return cls(digest, bad, np.array(pieces, np.float64).reshape(2, -1))

    @property
    def norm(self) -> float:
        """The norm of the tensor; NaN if a number of it is not finite."""
        return float("nan") if self.num_not_finite else float(np.linalg.norm(self.pieces[0]))

    def difference(self, other: "Summary") -> float:
        """About the norm of the difference, relative to the larger norm; infinite where one alone is not finite."""
        if self.digest == other.digest:
            return 0.0
        if self.pieces.shape != other.pieces.shape or self.num_not_finite != other.num_not_finite:
            return float("inf")
        scale = max(float(np.linalg.norm(each.pieces[0])) for each in (self, other))
        apart = np.linalg.norm(self.pieces - other.pieces, axis=1)
        return float(apart.max()) / scale if scale else 0.0


def _signed_sum(part: NDArray[np.float32]) -> float:
    """The sum of a vector's numbers, each with a sign that its place decides."""
    signs, end = _signs(), len(part) // _NUM_SIGNS * _NUM_SIGNS
    whole, rest = part[:end].reshape(-1, _NUM_SIGNS).sum(0, dtype=np.float64), part[end:].astype(np.float64)
    return float((whole * signs).sum() + (rest * signs[: len(rest)]).sum())


@functools.cache
def _signs() -> Floats:
    """[_NUM_SIGNS] 1 or -1 at random, the same everywhere."""
    return np.random.default_rng(0).choice([-1.0, 1.0], _NUM_SIGNS)


@dataclass(frozen=True, slots=True)
class Computation:
    """What a micro-batch computed: name -> summary, in the order in which it was computed."""

    values: Mapping[str, Summary]
    """Modules' inputs and outputs, if asked for; log-probs of each datum; the loss; gradients by parameter."""
    loss: float

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient of the sum over the micro-batch, which no `grad_scale` has touched."""
        return float(
            np.linalg.norm([each.norm for name, each in self.values.items() if name.startswith("gradient of ")])
        )

    @property
    def is_finite(self) -> bool:
        """Whether every number is."""
        return not any(each.num_not_finite for each in self.values.values())

    def first_fault(self) -> str:
        """The first value that is not finite, or an empty text."""
        found = (f"{name} ({each.num_not_finite} numbers)" for name, each in self.values.items() if each.num_not_finite)
        return next(found, "")

    def differences(self, other: "Computation") -> dict[str, float]:
        """Name -> relative difference, of all values that both have and that are not equal, in order."""
        both = (
            (name, each.difference(other.values[name])) for name, each in self.values.items() if name in other.values
        )
        return {name: apart for name, apart in both if apart}


def compute(engine: Engine, microbatch: Sequence[Datum], loss: Loss, *, layers: bool = False) -> Computation:
    """The forward and backward pass of a micro-batch alone; leaves no gradient. `layers` looks at every module."""
    seen: dict[str, Summary] = {}
    with observed(seen) if layers else contextlib.nullcontext():
        output = engine.forward_backward([microbatch], loss)
    for number, logprobs in enumerate(output.logprobs):
        seen[f"log-probs of datum {number}"] = Summary.of(torch.from_numpy(np.ascontiguousarray(logprobs)))
    total = float(output.metrics["loss"])
    seen["loss"] = Summary.of(torch.tensor([total]))
    for name, parameter in engine.hf_parameters():
        if parameter.grad is not None:
            seen[f"gradient of {name}"] = Summary.of(parameter.grad)
    engine.zero_grad()
    return Computation(seen, total)


@contextlib.contextmanager
def observed(seen: dict[str, Summary]) -> Generator[None]:
    """Within the block, each module's first input and output are summed up under its name, when it is first called."""
    names: dict[int, str] = {}
    running = list[nn.Module]()

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if not running:
            for name, part in module.named_modules():
                names.setdefault(id(part), name or type(part).__name__)
        running.append(module)
        _note(seen, f"input of {names.get(id(module), type(module).__name__)}", inputs)

    def after(module: nn.Module, _inputs: tuple[object, ...], output: object) -> None:
        running.pop()
        _note(seen, f"output of {names.get(id(module), type(module).__name__)}", output)

    handles = [hooks.register_module_forward_pre_hook(before), hooks.register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(seen: dict[str, Summary], name: str, values: object) -> None:
    first = values[0] if isinstance(values, tuple) and values else values
    if isinstance(first, Tensor) and name not in seen:
        seen[name] = Summary.of(first)
