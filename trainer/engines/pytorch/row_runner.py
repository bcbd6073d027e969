"""Computes the packed rows of one call: one after the other here, in a pipeline in `pipelined_rows.py`.

Calls go one way: an engine calls its `RowRunner`, and the runner calls the function that scores a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl.data.packing import PackedRow, pack_row
from rl.losses import Loss, LossInputs
from rl.types import Datum, ForwardBackwardOutput
from trainer.engines.pytorch.failure_sync import FailureSync
from trainer.engines.pytorch.outputs import OutputCollector

_IDLE_DATUM = Datum(tokens=np.zeros(1, dtype=np.int64), loss_inputs={"target_tokens": np.zeros(1, dtype=np.int64)})


class ScoreRow(Protocol):
    """The forward pass of a model over one row."""

    def __call__(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs [P] float32 of a row's scored pairs and, if asked for, entropies [P] float32.

        The pairs are `row.scored` and `row.targets`. A value head returns values [P] float32 and None.
        """
        ...


class RowRunner(ABC):
    """Computes a call's rows. Every rank has equally many; a row is None where only other ranks have datums."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        """Rows are computed on `device`; `num_ranks` are all ranks of the trainer."""
        self.failure_sync = FailureSync(num_ranks, device)
        self._num_ranks = num_ranks
        self._device = device

    @abstractmethod
    def forward_backward(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        """Adds the gradient of the loss to the parameters' and each of this rank's rows to the output.

        Rows that score nothing leave a gradient of zeros.
        """

    @abstractmethod
    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        """Adds each of this rank's rows to the output, without a loss."""

    @abstractmethod
    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """What this rank answers, given what it has computed itself."""


class SequentialRows(RowRunner):
    """Runs forward and backward passes row by row."""

    def __init__(self, score: ScoreRow, num_ranks: int, device: torch.device) -> None:
        """`score` is the model's forward pass."""
        super().__init__(num_ranks, device)
        self._score = score

    def forward_backward(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        nothing_scored = not any(row is not None and len(row.scored) for row in rows)
        for row in rows:
            if row is not None and len(row.scored):
                self._forward_backward_row(row, loss, output)
                continue
            if row is not None:
                output.add(row, None, None, {})
            # Sharded parameters are gathered by collectives, so a rank without work runs the model all the same. It
            # has a gradient of zeros then, and so has a single rank that has no work in the whole call.
            if self._num_ranks > 1 or nothing_scored:
                scores, _ = self._score(idle_row(), entropy=False)
                self.failure_sync.sync(failed=False)
                (scores.sum() * 0.0).backward()

    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        for row in rows:
            if row is not None and len(row.scored):
                output.add(row, *of_positions(row, *self._score(row, entropy=entropy)), {})
                continue
            if row is not None:
                output.add(row, None, None, {})
            if self._num_ranks > 1:
                self._score(idle_row(), entropy=entropy)

    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        return output

    def _forward_backward_row(self, row: PackedRow, loss: Loss, output: OutputCollector) -> None:
        scores, entropy = of_positions(row, *self._score(row, entropy=loss.needs_entropy))
        loss_sum, metrics = self.failure_sync.run(lambda: loss(scores, entropy, loss_inputs(row, self._device)))
        output.add(row, scores, None, {"loss": loss_sum.detach(), **metrics})
        loss_sum.backward()


def idle_row() -> PackedRow:
    """A row of one token, which a rank without work computes and discards while other ranks compute theirs."""
    return pack_row([_IDLE_DATUM], share_prefixes=False)


def of_positions(row: PackedRow, scores: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores and entropies [P] of a row's scored pairs -> those of its scored positions [S]."""
    # The gradient of `index_select` would be a sum in no certain order on a GPU.
    pair_index = to_tensor(row.pair_index, scores.device)
    return scores[pair_index], None if entropy is None else entropy[pair_index]


def loss_inputs(row: PackedRow, device: torch.device) -> LossInputs:
    """A row's loss inputs as tensors on the device."""
    return LossInputs(
        arrays={name: to_tensor(array, device) for name, array in row.loss_inputs.items()},
        datum_index=to_tensor(row.datum_index, device),
        num_datums=len(row.lengths),
    )


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copies an array to the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
