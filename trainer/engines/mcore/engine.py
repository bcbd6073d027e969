"""The megatron engine: Megatron-core's decoder, with its tensor and expert parallelism, driven by our loop.

Gradients, AdamW, failures, offload and checkpoints are those of every engine on PyTorch, because Megatron-core's own
work on CUDA only. Stages of a pipeline are run by torch's schedules, as those of torchtitan are. TransformerEngine is
not used.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rl.data.packing import PackedRow, pack_row, pad_row
from trainer.config import TrainerConfig
from trainer.engines.base import Microbatch
from trainer.engines.decoder_config import read_decoder_config
from trainer.engines.mcore.core_model import build_model
from trainer.engines.mcore.groups import make_groups
from trainer.engines.mcore.layers import plan_documents
from trainer.engines.mcore.masters import MasterSlices, by_name
from trainer.engines.mcore.sharded_masters import ShardedMasters
from trainer.engines.mcore.stage import Stage
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.hf_weights import load_hf_weights
from trainer.engines.pytorch.pipeline import Pipeline, StageInputs
from trainer.engines.pytorch.pipelined_rows import PipelinedRows
from trainer.engines.pytorch.ranks import choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows, to_tensor


class MegatronEngine(TorchEngine):
    """One rank of a Megatron-core model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        decoder = read_decoder_config(config.model)
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device, alone=True)
        groups = make_groups(config, device)
        stages, named = build_model(config, decoder, groups, device)
        masters = ShardedMasters if config.data_parallel_shard > 1 else MasterSlices
        self._masters = masters(named, groups)
        with torch.no_grad():
            load_hf_weights(dict(by_name(self._masters)), config.model)
        self._masters.refresh()
        scorer = RowScorer(stages[0], config.num_token_shards, device)
        super().__init__(
            config,
            nn.ModuleList(stages),
            self._masters.parameters,
            describe_model(config.model, config.head),
            device,
            SequentialRows(scorer.score, config.num_ranks, device)
            if config.pipeline_parallel == 1
            else PipelinedRows(
                scorer,
                Pipeline(config, stages, decoder.dim, device, groups.pipeline, None),
                config.num_ranks,
                device,
            ),
            masters=self._masters,
        )

    @property
    def shares_prefixes(self) -> bool:
        return self._device.type == "cpu"

    def _pack_row(self, microbatch: Microbatch) -> PackedRow:
        shares = self.shares_prefixes
        return pack_row(microbatch, share_prefixes=shares, share_opening=shares)

    def _reduce_gradients(self) -> None:
        self._masters.reduce_gradients()

    def _free_flat_gradients(self) -> None:
        self._masters.drop_gradients()


class RowScorer:
    """From packed rows to the inputs of stages, and from the outputs of the last stage to scores."""

    def __init__(self, stage: Stage, num_token_shards: int, device: torch.device) -> None:
        """`stage` is the whole model, or the first of this rank's pipeline stages."""
        self._stage = stage
        self._num_token_shards = num_token_shards
        self._device = device

    def score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """A `ScoreRow`, for a stage that is the whole model."""
        inputs, _ = self.inputs(row, entropy=entropy)
        return self._stage(inputs.tokens, **inputs.others)

    def inputs(self, row: PackedRow, *, entropy: bool) -> tuple[StageInputs, None]:
        """Returns what every stage takes."""
        row = pad_row(row, self._num_token_shards)
        others: dict[str, Any] = {
            "positions": to_tensor(row.positions, self._device)[None],
            "plan": plan_documents(row.documents, self._device),
            "scored": to_tensor(row.scored, self._device),
            "targets": to_tensor(row.loss_inputs["target_tokens"], self._device),
            "entropy": entropy,
        }
        return StageInputs(to_tensor(row.tokens, self._device)[None], others), None

    def whole(self, scores: Tensor, shard: None, num_scored: int) -> Tensor:
        """[S] scores of a row, of which every rank of the last stage has all."""
        del shard, num_scored
        return scores
