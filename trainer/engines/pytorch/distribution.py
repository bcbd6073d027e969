"""The distribution that each scored pair of a row is scored under: the one that its token was sampled from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl.data.packing import PackedRow
from trainer.engines.pytorch.row_runner import to_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """What is done to the logits of scored pairs. FSDP casts the tensors of a model's inputs, but not these."""

    scale: Tensor | None = None
    """[P] float32, what logits are multiplied by: the inverse temperatures. None if all are 1."""

    @classmethod
    def of_row(cls, row: PackedRow, device: torch.device) -> "Distribution":
        """The distribution of a row's scored pairs, on the device."""
        return cls(None if (row.temperatures == 1).all() else to_tensor(1 / row.temperatures, device))

    def at(self, where: Tensor) -> "Distribution":
        """That of the pairs with these indices."""
        return Distribution(None if self.scale is None else self.scale[where])


MODEL_DISTRIBUTION = Distribution()
"""The model's own: the whole vocabulary at temperature 1."""
