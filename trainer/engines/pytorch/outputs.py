"""Collects the results of one call's micro-batches into one output. Copies them from the device once, at the end."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl.data.batching import merge_metrics
from rl.data.packing import PackedRow
from rl.types import ForwardBackwardOutput, Head
from trainer.engines.memory import PeakMemory

_Arrays = tuple[NDArray[np.float32], ...]
_Row = tuple[PackedRow, Tensor | None, Tensor | None]
Change = Callable[[PackedRow, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


class OutputCollector:
    """Takes rows and returns one `ForwardBackwardOutput`, with datums in the order in which they came."""

    def __init__(
        self, memory: PeakMemory, head: Head, *, entropy: bool, flops: Callable[[PackedRow], float] | None = None
    ) -> None:
        """With `entropy`, every row comes with entropies. `memory` measures this call, and its time starts now.

        `flops` tells the operations that a row needs. A forward pass has none, and reports neither them nor a loss.
        """
        self._head = head
        self._flops = flops
        self._entropy = entropy
        self._memory = memory
        self._start = time.perf_counter()
        self._rows: list[_Row] = []
        self._metrics: list[Mapping[str, Tensor]] = []

    def add(self, row: PackedRow, scores: Tensor | None, entropy: Tensor | None, metrics: Mapping[str, Tensor]) -> None:
        """Takes a row's log-probs or values [S] and entropies [S]. They are None for a row without scored positions."""
        self._rows.append((row, scores, entropy))
        self._metrics.append(metrics)

    def result(self, change: Change | None = None) -> ForwardBackwardOutput:
        """Returns everything added so far. `change` replaces a row's scores and entropies by as many others."""
        if change is not None:
            self._rows = [_changed(change, *of_row) for of_row in self._rows]
        num_loss_tokens = float(sum(row.num_loss_tokens for row, _, _ in self._rows))
        parts = [{name: float(value) for name, value in metrics.items()} for metrics in self._metrics]
        scores = _unpack([(row, scores) for row, scores, _ in self._rows])
        of_training = (
            {}
            if self._flops is None  # rows that score nothing have no metrics, and their loss is 0
            else {"loss": 0.0, "model_flops": sum(self._flops(row) for row, _, _ in self._rows)}
        )
        return ForwardBackwardOutput(
            logprobs=scores if self._head == "lm" else (),
            values=scores if self._head == "value" else None,
            entropy=_unpack([(row, entropy) for row, _, entropy in self._rows]) if self._entropy else None,
            metrics={
                "num_loss_tokens": num_loss_tokens,
                "memory_peak_bytes_max": float(self._memory.peak_bytes()),
                "seconds_engine_max": time.perf_counter() - self._start,
                **of_training,
                **merge_metrics(parts),
            },
        )


def _changed(change: Change, row: PackedRow, scores: Tensor | None, entropy: Tensor | None) -> _Row:
    if scores is None:
        return row, None, None
    entropy = None if entropy is None else entropy.detach()
    changed = row, *change(row, scores.detach(), entropy)
    shapes = [None if values is None else tuple(values.shape) for values in changed[1:]]
    expected = [None if values is None else tuple(values.shape) for values in (scores, entropy)]
    if shapes != expected:
        raise ValueError(f"hooks.after returned scores and entropies of shapes {shapes}; {expected} are expected")
    return changed


def _unpack(rows: Sequence[tuple[PackedRow, Tensor | None]]) -> _Arrays:
    empty = np.zeros(0, dtype=np.float32)
    return tuple(
        array
        for row, values in rows
        for array in row.unpack(empty if values is None else values.detach().float().cpu().numpy())
    )
