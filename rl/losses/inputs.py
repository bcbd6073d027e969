"""The inputs of a loss besides log-probs, and the type of a loss function. Does not import torch; see `base.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl.types import REPORTED_WEIGHT

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]
LossFunction = Callable[..., tuple["Tensor", Metrics]]
"""(logprobs or values [S], entropy [S] or None, inputs, *, options) -> (loss sum, metric sums).

Options are keyword-only parameters with defaults. A run reports every metric: one whose name ends in `_max` or `_min`
is merged over micro-batches by maximum or minimum, all others are summed, and the sums are divided by the number of
scored tokens unless the name ends in `_sum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The scored positions of one micro-batch, concatenated over its datums. Legend: S scored positions, D datums."""

    arrays: Mapping[str, Tensor]
    """Name -> [S]. Always holds `weights` and `target_tokens`."""
    datum_index: Tensor
    """[S] int64 in 0..D-1: the datum of the micro-batch that a position belongs to."""
    num_datums: int
    """D. It cannot be read off `datum_index`: a datum without a scored position does not occur there."""

    def __getitem__(self, name: str) -> Tensor:
        """[S] the array of this name. Raises KeyError if the datums do not have it."""
        return self.arrays[name]

    @property
    def weights(self) -> Tensor:
        """[S] the factor of each position's term in the loss."""
        return self.arrays["weights"]

    def counted(self) -> tuple[Tensor, LossInputs]:
        """[C] indices of the positions that are not only reported, and their inputs."""
        size = self.weights.abs()
        rows = ((size > REPORTED_WEIGHT) | (size == 0)).nonzero().squeeze(1)
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return rows, replace(self, arrays=arrays, datum_index=self.datum_index[rows])

    def mean_per_datum(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """[D] mean of `values` [S] over each datum's scored positions; 0 for a datum without scored positions.

        With a `mask` [S], only positions where it is not 0 count.
        """
        counted = values.new_ones(len(values)) if mask is None else (mask != 0).to(values.dtype)
        sums = values.new_zeros(self.num_datums).index_add(0, self.datum_index, values * counted)
        counts = values.new_zeros(self.num_datums).index_add(0, self.datum_index, counted)
        return sums / counts.clamp(min=1)
