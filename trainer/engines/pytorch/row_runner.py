"""Computes the packed rows of one call, one after the other, and collects its output. `pipeline.py` does so in stages.

Calls go one way: an engine calls its `RowRunner`, and the runner calls the function that scores a row.

    engine -> RowRunner.accumulate(rows, loss, output)
                for each row: score(row) -> loss -> FailureSync -> backward; OutputCollector.add(row, log-probs)
    engine <- OutputCollector.result(): copied from the device once, at the end
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rl.data.batching import merge_metrics
from rl.data.packing import PackedRow, pack_row
from rl.losses import Loss, LossInputs
from rl.system.hardware import hand_back_if_short
from rl.types import Datum, ForwardBackwardOutput, Head
from trainer.engines.base import PeakMemory, RankFailureError

_IDLE_DATUM = Datum(tokens=np.zeros(1, dtype=np.int64), loss_inputs={"target_tokens": np.zeros(1, dtype=np.int64)})
T = TypeVar("T")


class FailureSync:
    """Ranks report failures to each other; otherwise they would wait in a collective that a failed rank never joins.

    It costs the reduction of one number, which the hosts do: a rank would wait for its GPU to read one there. With a
    single rank it does nothing.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._failures = torch.zeros(())

    def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank. If it raises on one rank, the others raise RankFailureError. A collective."""
        try:
            result = work()
        except Exception:
            self.sync(failed=True)
            raise
        self.sync(failed=False)
        return result

    def sync(self, *, failed: bool) -> None:
        """Raises RankFailureError if another rank has failed and this one has not. A collective."""
        if self._num_ranks > 1:
            dist.all_reduce(self._failures.fill_(failed))
            if self._failures and not failed:
                raise RankFailureError("another rank failed in this call")


_Arrays = tuple[NDArray[np.float32], ...]


class OutputCollector:
    """Takes rows and returns one `ForwardBackwardOutput`, with datums in the order in which they came."""

    def __init__(
        self, memory: PeakMemory, head: Head, *, entropy: bool, flops: Callable[[PackedRow], float] | None = None
    ) -> None:
        """With `entropy`, every row comes with entropies. `memory` measures this call, and its time starts now.

        `flops` counts the operations that a row needs. A forward pass has none, and reports neither them nor a loss.
        """
        self._head = head
        self._flops = flops
        self._entropy = entropy
        self._memory = memory
        self._start = time.perf_counter()
        self._rows: list[tuple[PackedRow, Tensor | None, Tensor | None]] = []
        self._metrics: list[Mapping[str, Tensor]] = []

    def add(self, row: PackedRow, scores: Tensor | None, entropy: Tensor | None, metrics: Mapping[str, Tensor]) -> None:
        """Takes a row's log-probs or values [S] and entropies [S]. They are None for a row without scored positions."""
        hand_back_if_short()
        self._rows.append((row, scores, entropy))
        self._metrics.append(metrics)

    def result(self) -> ForwardBackwardOutput:
        """Returns everything added so far."""
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


def _unpack(rows: Sequence[tuple[PackedRow, Tensor | None]]) -> _Arrays:
    empty = np.zeros(0, dtype=np.float32)
    return tuple(
        array
        for row, values in rows
        for array in row.unpack(empty if values is None else values.detach().float().cpu().numpy())
    )


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
        self.failure_sync = FailureSync(num_ranks)
        self._num_ranks = num_ranks
        self._device = device

    @abstractmethod
    def accumulate(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        """Adds the gradient of the loss to the parameters' and each of this rank's rows to the output.

        Rows that score nothing leave a gradient of zeros.
        """

    @abstractmethod
    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        """Adds each of this rank's rows to the output, without a loss."""

    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """This rank's answer, made of its own results."""
        return output


class SequentialRows(RowRunner):
    """Runs forward and backward passes row by row."""

    def __init__(self, score: ScoreRow, num_ranks: int, device: torch.device) -> None:
        """`score` is the model's forward pass."""
        super().__init__(num_ranks, device)
        self._score = score

    def accumulate(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
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

    def _forward_backward_row(self, row: PackedRow, loss: Loss, output: OutputCollector) -> None:
        scores, entropy = of_positions(row, *self._score(row, entropy=loss.needs_entropy))
        loss_sum, metrics = self.failure_sync.run(lambda: loss(scores, entropy, loss_inputs(row, self._device)))
        output.add(row, scores, None, {"loss": loss_sum.detach(), **metrics})
        loss_sum.backward()


def idle_row() -> PackedRow:
    """A row of one token, which a rank without work computes and discards while other ranks compute theirs."""
    return pack_row([_IDLE_DATUM], share_prefixes=False)


def of_positions(row: PackedRow, scores: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores and entropies [P] of a row's scored pairs -> scores and entropies [S] of its scored positions."""
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


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPlan:
    """What attention needs to know about a row, or a rank's shard of L of its tokens, with the experts of each token.

    Replaying the generator's experts is R3 (https://arxiv.org/abs/2510.11370): rounding alone has a trainer choose
    other ones for some tokens. Their weights are the trainer's own, so that the router learns. The ids travel with
    attention's plan, because every layer gets that, and gets it again when its activations are recomputed.
    """

    attention: object
    experts: Tensor
    """[layers, L, k] int64"""


def with_routes(attention: object, row: PackedRow, device: torch.device, rows: Tensor | slice = slice(None)) -> object:
    """What attention needs to know, with the experts of the row's tokens `rows` if it has routes."""
    if row.routes is None:
        return attention
    experts = to_tensor(np.moveaxis(row.routes, 1, 0).astype(np.int64), device)
    return RoutedPlan(attention, experts[:, rows])


def of_layer(plan: object, layer: int) -> tuple[Any, Tensor | None]:
    """What attention needs to know, and the experts [L, k] that a layer replays, if it does."""
    return (plan.attention, plan.experts[layer]) if isinstance(plan, RoutedPlan) else (plan, None)


def to_tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies an array to the device."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
