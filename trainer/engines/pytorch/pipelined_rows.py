"""Computes the packed rows of one call in a pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl.data.packing import PackedRow
from rl.losses import Loss
from rl.types import ForwardBackwardOutput
from trainer.engines.pytorch.outputs import OutputCollector
from trainer.engines.pytorch.pipeline import Pipeline, StageInputs
from trainer.engines.pytorch.row_runner import RowRunner, idle_row, loss_inputs, of_positions


class RowScorer(Protocol):
    """Between packed rows and the stages of a model."""

    def inputs(self, row: PackedRow, *, entropy: bool) -> tuple[StageInputs, Any]:
        """Returns what every stage takes, and this rank's shard of the row, if rows are sharded."""
        ...

    def whole(self, scores: Tensor, shard: Any, num_scored: int) -> Tensor:
        """Scores of this rank's shard -> [P] of the whole row. A collective if there are shards."""
        ...


class PipelinedRows(RowRunner):
    """Sends all rows of a call through the pipeline's stages. The rank with the last stage collects the output."""

    def __init__(self, scorer: RowScorer, pipeline: Pipeline, num_ranks: int, device: torch.device) -> None:
        """`num_ranks` are all ranks of the trainer, not only those of this pipeline."""
        super().__init__(num_ranks, device)
        self._scorer = scorer
        self._pipeline = pipeline

    def forward_backward(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        """See `RowRunner`. When the loss raises, later rows still go through, with a loss of zero, so no rank waits."""
        call = _PipelinedCall(self._scorer, self._padded(rows), entropy=loss.needs_entropy)
        metrics: dict[int, Mapping[str, Tensor]] = {}
        errors: list[Exception] = []

        def compute_loss(scores: Tensor, index: int) -> Tensor:
            row = call.rows[index]
            if row is not None and not errors:
                try:
                    loss_sum, metrics_of_row = loss(*call.row_scores(scores, index), loss_inputs(row, self._device))
                    metrics[index] = {"loss": loss_sum.detach(), **metrics_of_row}
                    return loss_sum
                except Exception as error:  # raised below, once all ranks are through
                    errors.append(error)
            return scores.sum() * 0.0

        scores = self._pipeline.run(call.inputs, compute_loss)
        self.failure_sync.sync(failed=bool(errors))
        if errors:
            raise errors[0]
        self._collect(rows, call, scores, metrics, output)

    def forward(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        call = _PipelinedCall(self._scorer, self._padded(rows), entropy=entropy)
        self._collect(rows, call, self._pipeline.run(call.inputs, None), {}, output)

    def shared_output(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """The output of the pipeline's last rank, on every rank, with the most memory and time that any rank took."""
        outputs: list[Any] = [None] * dist.get_world_size(self._pipeline.group)
        dist.all_gather_object(outputs, output, self._pipeline.group)
        names = ("memory_peak_bytes_max", "seconds_engine_max")
        most = {name: max(each.metrics[name] for each in outputs) for name in names}
        return replace(outputs[-1], metrics={**outputs[-1].metrics, **most})

    def _padded(self, rows: Sequence[PackedRow | None]) -> list[PackedRow | None]:
        """As many rows as the schedule needs; None for each that scores nothing."""
        missing = self._pipeline.num_microbatches(len(rows)) - len(rows)
        return [row if row is not None and len(row.scored) else None for row in (*rows, *[None] * missing)]

    def _collect(
        self,
        rows: Sequence[PackedRow | None],
        call: "_PipelinedCall",
        scores: Sequence[Tensor],
        metrics: Mapping[int, Mapping[str, Tensor]],
        output: OutputCollector,
    ) -> None:
        if not self._pipeline.is_last:
            return
        for index, row in enumerate(rows):
            if row is not None and call.rows[index] is not None:
                output.add(row, *call.row_scores(scores[index].detach(), index), metrics.get(index, {}))
            elif row is not None:
                output.add(row, None, None, {})


class _PipelinedCall:
    """The rows of one call and their inputs; an idle row stands in for None."""

    def __init__(self, scorer: RowScorer, rows: Sequence[PackedRow | None], *, entropy: bool) -> None:
        self._scorer = scorer
        self.rows = rows
        prepared = [scorer.inputs(row or idle_row(), entropy=entropy) for row in rows]
        self.inputs = [inputs for inputs, _ in prepared]
        self._shards = [shard for _, shard in prepared]

    def row_scores(self, scores: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        """[1 or 2, p] outputs of the last stage -> log-probs or values [S], and entropies [S] if there are two."""
        row = self.rows[index]
        assert row is not None
        whole = [self._scorer.whole(each, self._shards[index], len(row.scored)) for each in scores]
        return of_positions(row, whole[0], whole[1] if len(whole) > 1 else None)
