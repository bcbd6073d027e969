"""The torchtitan engine: torchtitan's model, parallelized by torchtitan, driven by our loop.

With more than one rank torchtitan's `parallelize_fn` applies tensor, context and expert parallelism, activation
checkpointing and FSDP2, to each stage of a pipeline if there is one. With one rank nothing is sharded and
`MixedPrecision` does the mixed precision.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.data.packing import PackedRow, pad_row
from rl.losses import Loss
from rl.types import ForwardBackwardOutput
from trainer.config import TrainerConfig
from trainer.engines.base import Microbatch
from trainer.engines.decoder_config import read_decoder_config
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.outputs import OutputCollector
from trainer.engines.pytorch.ranks import choose_device, init_process_group
from trainer.engines.titan.context import RowShard, gather_scored, row_multiple, shard_row
from trainer.engines.titan.model.attention import attention_masks, sharded_attention_masks, shares_prefixes
from trainer.engines.titan.model.build import build_model
from trainer.engines.titan.model.experts import split_experts
from trainer.engines.titan.model.specs import named_parameters, share_rope_cache
from trainer.engines.titan.pipeline import StageInputs


class TitanEngine(TorchEngine):
    """One rank of a torchtitan model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        hf_config = read_decoder_config(config.model)
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        self._parts, self._context_mesh, self._pipeline = build_model(config, hf_config, device)
        super().__init__(
            config,
            nn.ModuleList(self._parts),
            dict(named_parameters(self._parts)),
            describe_model(config.model, config.head),
            device,
        )

    @property
    def shares_prefixes(self) -> bool:
        return shares_prefixes(self._device)

    def _move_model(self, device: torch.device) -> None:
        super()._move_model(device)
        share_rope_cache(self._parts)  # moving gives each layer its own again

    def hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield from split_experts(name, parameter)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss) -> ForwardBackwardOutput:
        return self._answer(super().forward_backward(microbatches, loss))

    def forward(self, microbatches: Sequence[Microbatch], *, entropy: bool = False) -> ForwardBackwardOutput:
        return self._answer(super().forward(microbatches, entropy=entropy))

    def _score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        inputs, shard = self._inputs(row, entropy=entropy)
        logprobs, entropies = self._parts[0](inputs.tokens, **inputs.others)
        whole = self._whole(logprobs, shard, len(row.scored))
        return whole, None if entropies is None else self._whole(entropies, shard, len(row.scored))

    def _inputs(self, row: PackedRow, *, entropy: bool) -> tuple[StageInputs, RowShard | None]:
        """What the model takes of a row, and this rank's shard of it under context parallelism."""
        row = pad_row(row, row_multiple(self._config, self._device))
        tokens, positions = self._tensor(row.tokens), self._tensor(row.positions)
        scored, targets = self._tensor(row.scored), self._tensor(row.loss_inputs["target_tokens"])
        decoder = self._parts[0]
        if self._context_mesh is None:
            shard, rows = None, slice(None)
            masks = attention_masks(decoder, positions[None], row.documents)
        else:
            shard = shard_row(len(tokens), scored, self._context_mesh.get_local_rank(), self._context_mesh.size())
            rows, scored, targets = shard.rows, shard.scored, targets[shard.where]
            masks = sharded_attention_masks(decoder, positions[None], row.documents, shard, self._context_mesh)
        others: Mapping[str, Any] = {
            "positions": positions[rows][None],
            "attention_masks": masks,
            "scored": scored,
            "targets": targets,
            "entropy": entropy,
        }
        return StageInputs(tokens[rows][None], others), shard

    def _whole(self, values: Tensor, shard: RowShard | None, num_scored: int) -> Tensor:
        """The values of a row's scored positions from those of this rank's shard, if it has only one."""
        if self._context_mesh is None or shard is None:
            return values
        return gather_scored(values, shard, num_scored, self._context_mesh.get_group())

    def _forward_backward_rows(self, rows: Sequence[PackedRow | None], loss: Loss, output: OutputCollector) -> None:
        if self._pipeline is None:
            super()._forward_backward_rows(rows, loss, output)
        else:
            self._send_through(rows, loss, output, entropy=loss.needs_entropy)

    def _forward_rows(self, rows: Sequence[PackedRow | None], output: OutputCollector, *, entropy: bool) -> None:
        if self._pipeline is None:
            super()._forward_rows(rows, output, entropy=entropy)
        else:
            self._send_through(rows, None, output, entropy=entropy)

    def _send_through(
        self, rows: Sequence[PackedRow | None], loss: Loss | None, output: OutputCollector, *, entropy: bool
    ) -> None:
        """Computes a call's rows in the pipeline; the rank with its last stage adds them to the output.

        When the loss raises, rows behind it still go through, with a loss of zero, so that no rank waits for another.
        """
        assert self._pipeline is not None
        missing = self._pipeline.num_microbatches(len(rows)) - len(rows)
        padded = [row if row is not None and len(row.scored) else None for row in (*rows, *[None] * missing)]
        prepared = [self._inputs(row or self._idle_row(), entropy=entropy) for row in padded]
        metrics: dict[int, Mapping[str, Tensor]] = {}
        errors: list[Exception] = []

        def of_row(scores: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
            row, shard = padded[index], prepared[index][1]
            assert row is not None
            values = [self._whole(each, shard, len(row.scored)) for each in scores]
            return values[0], values[1] if len(values) > 1 else None

        def compute_loss(scores: Tensor, index: int) -> Tensor:
            row = padded[index]
            if loss is not None and row is not None and not errors:
                try:
                    logprobs, entropies = of_row(scores, index)
                    loss_sum, metrics_of_row = loss(logprobs, entropies, self._loss_inputs(row))
                    metrics[index] = {"loss": loss_sum.detach(), **metrics_of_row}
                    return loss_sum
                except Exception as error:  # told to the caller once every rank is through
                    errors.append(error)
            return scores.sum() * 0.0

        scores = self._pipeline.run([inputs for inputs, _ in prepared], None if loss is None else compute_loss)
        if loss is not None:
            self._failure_sync.tell(failed=bool(errors))
        if errors:
            raise errors[0]
        if not self._pipeline.is_last:
            return
        for index, row in enumerate(rows):
            if row is not None and padded[index] is not None:
                output.add(row, *of_row(scores[index].detach(), index), metrics.get(index, {}))
            elif row is not None:
                output.add(row, None, None, {})

    def _answer(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """In a pipeline, what its last rank has to say, on every rank."""
        if self._pipeline is None:
            return output
        outputs: list[Any] = [None] * dist.get_world_size(self._pipeline.group)
        dist.all_gather_object(outputs, output, self._pipeline.group)
        names = ("memory_peak_bytes_max", "seconds_engine_max")
        most = {name: max(each.metrics[name] for each in outputs) for name in names}
        return replace(outputs[-1], metrics={**outputs[-1].metrics, **most})
