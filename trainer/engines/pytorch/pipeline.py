"""Pipeline parallelism: an engine cuts the layers into stages, and torch's schedules send packed rows through them.

`PipelinedRows` computes the rows of one call in a `Pipeline`.

A row keeps its own length: `_RowStage` gives every micro-batch buffers of its own size, while upstream requires all
micro-batches to have one size. A schedule and its stages fix the number of micro-batches and whether there is a
backward pass, so they are made anew for every call, which costs one exchange between adjacent stages in each direction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _PipelineSchedule,  # pyright: ignore[reportPrivateUsage]
    get_schedule_class,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rl.data.packing import PackedRow
from rl.losses import Loss
from rl.system.ranks import all_gather
from rl.types import ForwardBackwardOutput
from trainer.config import TrainerConfig
from trainer.engines.pytorch.ranks import DTYPES
from trainer.engines.pytorch.row_runner import OutputCollector, RowRunner, idle_row, loss_inputs, of_positions


@dataclass(frozen=True, slots=True)
class StageInputs:
    """One row as input of a model."""

    tokens: Tensor
    """[1, L], the input of the first stage."""
    others: Mapping[str, object]
    """All other inputs, which every stage gets."""


class Pipeline:
    """This rank's stages of a model."""

    def __init__(
        self,
        config: TrainerConfig,
        parts: Sequence[nn.Module],
        dim: int,
        device: torch.device,
        mesh: DeviceMesh,
        tensor_mesh: DeviceMesh | None,
    ) -> None:
        """`parts` are this rank's stages in order, `dim` the size of a hidden state, and `mesh` the pipeline's ranks.

        `tensor_mesh` has the ranks of this rank's tensor-parallel group, if stages take and return DTensors.
        """
        self._config = config
        self._parts = parts
        self._dim = dim
        self._device = device
        self._mesh = mesh
        self._tensor_mesh = tensor_mesh

    @property
    def group(self) -> torch.distributed.ProcessGroup:
        """The ranks of this pipeline. The last rank holds the last stage."""
        return self._mesh.get_group()

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._mesh.get_local_rank() == self._mesh.size() - 1

    def num_microbatches(self, count: int) -> int:
        """The number of micro-batches, at least `count`, that the schedule needs."""
        if self._config.pipeline_schedule == "1F1B":
            return max(count, self._config.num_stages)
        # The interleaved schedule takes micro-batches in rounds of one per rank.
        return -(-max(count, 1) // self._mesh.size()) * self._mesh.size()

    def run(self, rows: Sequence[StageInputs], loss: Callable[[Tensor, int], Tensor] | None) -> list[Tensor]:
        """Sends rows through all stages and, with a `loss`, their gradients back. A collective of the pipeline.

        There must be `num_microbatches` rows. `loss` maps the last stage's output for a row, and the row's index, to a
        scalar. Returns the last stage's outputs on the rank that holds it, and an empty list on the others.
        """
        size, rank = self._mesh.size(), self._mesh.get_local_rank()
        stages = [self._stage(part, rank + i * size, rows) for i, part in enumerate(self._parts)]
        schedule_class = get_schedule_class(self._config.pipeline_schedule)
        held = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
        schedule: _PipelineSchedule = schedule_class(held, n_microbatches=len(rows), loss_fn=loss, scale_grads=False)  # pyright: ignore[reportArgumentType]
        for stage in stages:
            stage.has_backward = loss is not None
        # The public `step` would cut one tensor into equal micro-batches, but rows are micro-batches of unequal length.
        schedule._step_microbatches(  # pyright: ignore[reportPrivateUsage]
            arg_mbs=[(row.tokens,) if rank == 0 else () for row in rows],
            kwarg_mbs=[dict(row.others) for row in rows],
            target_mbs=list(range(len(rows))),
        )
        return stages[-1].output_chunks if self.is_last else []

    def _stage(self, part: nn.Module, index: int, rows: Sequence[StageInputs]) -> "_RowStage":
        lengths = [row.tokens.shape[1] // self._config.num_token_shards for row in rows]
        boundary: tuple[DeviceMesh, Placement] | None = None
        if self._tensor_mesh is not None:
            boundary = (self._tensor_mesh, Shard(1) if self._config.sequence_parallel else Replicate())
        hidden = torch.empty(1, 1, self._dim, dtype=DTYPES[self._config.compute_dtype], device="meta").requires_grad_()
        return _RowStage(
            part,
            index,
            self._config.num_stages,
            self._device,
            input_args=rows[0].tokens if index == 0 else hidden,
            output_args=hidden,
            group=self.group,
            lengths=lengths,
            boundary=boundary,
        )


class _RowStage(PipelineStage):
    """A stage of a decoder whose micro-batches are rows of different lengths."""

    def __init__(
        self, *args: Any, lengths: Sequence[int], boundary: tuple[DeviceMesh, Placement] | None, **kwargs: object
    ) -> None:
        """`lengths` are the tokens of each row whose hidden states this rank passes from stage to stage.

        Under tensor parallelism, `boundary` is the mesh and the placement of these hidden states.
        """
        super().__init__(*args, **kwargs)
        self._lengths = lengths
        self._boundary = boundary

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: object) -> Tensor:
        """Maps hidden states of a row to hidden states or, in the last stage, to [1 or 2, S] scores and entropies."""
        (hidden,) = args
        if self._boundary is not None and not self.is_first:
            mesh, placement = self._boundary
            hidden = DTensor.from_local(hidden, mesh, [placement], run_check=False)
        output = super().forward_maybe_with_nosync(hidden, **kwargs)
        if self.is_last:
            return torch.stack([values for values in output if values is not None])
        return output.to_local() if isinstance(output, DTensor) else output

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Skips the reduction in calls without a backward pass, which have no gradient."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for index, infos in self.args_recv_info.items():
            self._resize(infos, self._lengths[index])

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for index, infos in self.grad_recv_info.items():
            self._resize(infos, self._lengths[index])

    def _resize(self, infos: Sequence[Any], length: int) -> None:
        for info in infos:
            if info.buffer is not None:
                info.buffer = info.buffer.new_empty(1, length, info.buffer.shape[2])

    def _post_metadata_inference_cleanup(self) -> None:
        """Does nothing. Shapes are given, not inferred, and upstream's method would drop the accumulated gradients."""


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
        """`num_ranks` are all ranks of the trainer, not only this pipeline's."""
        super().__init__(num_ranks, device)
        self._scorer = scorer
        self._pipeline = pipeline

    def accumulate(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
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
        outputs = all_gather(output, self._pipeline.group)
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
