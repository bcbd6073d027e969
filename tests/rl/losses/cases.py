"""Random micro-batches in float64 for tests of losses, and derivatives without autograd."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rl.losses import LossInputs

Array = NDArray[np.float64]


def random_case(
    seed: int = 0, lengths: Sequence[int] = (3, 1, 6), *, size: int = 0, spread: float = 0.7
) -> tuple[Array, LossInputs]:
    """The trainer's log-probs [S] and all inputs that any loss may need. `size` asks for a single datum instead."""
    rng = np.random.default_rng(seed)
    lengths = [size] if size else lengths
    total = sum(lengths)
    q = -rng.exponential(size=total)
    p = q + rng.normal(scale=spread, size=total)
    arrays = {
        "weights": rng.choice([1.0, 0.25, -1e-6, 2.0], size=total),
        "logprobs": q,
        "advantages": rng.normal(size=total),
        "target_tokens": rng.integers(0, 9, size=total),
        "old_logprobs": q + rng.normal(scale=spread, size=total),
        "reference_logprobs": q + rng.normal(scale=spread, size=total),
        "old_values": rng.normal(size=total),
        "returns": rng.normal(size=total),
    }
    index = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return p, LossInputs(arrays=tensors, datum_index=index, num_datums=len(lengths))


def without(inputs: LossInputs, *names: str) -> LossInputs:
    """The same inputs without some of the arrays."""
    arrays = {name: array for name, array in inputs.arrays.items() if name not in names}
    return LossInputs(arrays=arrays, datum_index=inputs.datum_index, num_datums=inputs.num_datums)


def one_datum(inputs: LossInputs, datum: int) -> tuple[torch.Tensor, LossInputs]:
    """[S] mask of the positions of one datum, and a micro-batch of this datum alone."""
    rows = inputs.datum_index == datum
    arrays = {name: array[rows] for name, array in inputs.arrays.items()}
    return rows, LossInputs(arrays=arrays, datum_index=inputs.datum_index[rows] * 0, num_datums=1)


def slopes(function: Callable[[Array], float], at: Array, step: float = 1e-6) -> Array:
    """[S] derivative with respect to each element, by central differences."""
    found = np.zeros(len(at))
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        found[i] = (function(up) - function(down)) / (2 * step)
    return found
