"""Pipeline parallelism: an engine cuts the layers into stages, torch's schedules send packed rows through them.

A row keeps its own length: `_RowStage` gives every micro-batch buffers of its own size, while upstream requires all
micro-batches to have one size. A schedule and its stages fix the number of micro-batches and whether there is a
backward pass, so they are made anew for every call, which costs one exchange between adjacent stages in each direction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

from trainer.config import TrainerConfig
from trainer.engines.pytorch.ranks import DTYPES


@dataclass(frozen=True, slots=True)
class StageInputs:
    """One row as input of a model."""

    tokens: Tensor
    """[1, L], the input of the first stage."""
    others: Mapping[str, Any]
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
        self, *args: Any, lengths: Sequence[int], boundary: tuple[DeviceMesh, Placement] | None, **kwargs: Any
    ) -> None:
        """`lengths` are the tokens of each row whose hidden states this rank passes from stage to stage.

        Under tensor parallelism, `boundary` is the mesh and the placement of these hidden states.
        """
        super().__init__(*args, **kwargs)
        self._lengths = lengths
        self._boundary = boundary

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
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
