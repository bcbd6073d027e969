"""What a loss is given besides log-probs, and what its function looks like. Does not import torch; see `base.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, "Tensor"]
LossFunction = Callable[..., tuple["Tensor", Metrics]]
"""(logprobs or values [S], entropy [S] or None, inputs, *, options) -> (loss sum, metric sums). Options have
defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The scored positions of one micro-batch, concatenated over its datums. Legend: S scored positions, D datums."""

    arrays: Mapping[str, Tensor]
    """Name -> [S]. Always holds `weights` and `target_tokens`."""
    datum_index: Tensor
    """[S] int64, which datum of the micro-batch a position belongs to, in 0..D-1."""
    num_datums: int
    """D."""

    def __getitem__(self, name: str) -> Tensor:
        """[S] the array of that name."""
        return self.arrays[name]

    @property
    def weights(self) -> Tensor:
        """[S] what each position's term is multiplied by."""
        return self.arrays["weights"]

    def mean_per_datum(self, values: Tensor) -> Tensor:
        """[D] mean of `values` [S] over each datum's scored positions; 0 for a datum without any."""
        sums = values.new_zeros(self.num_datums).index_add(0, self.datum_index, values)
        counts = values.new_zeros(self.num_datums).index_add(0, self.datum_index, values.new_ones(len(values)))
        return sums / counts.clamp(min=1)
