"""The torchtitan engine: torchtitan's model, parallelized by torchtitan, driven by our loop.

With more than one rank torchtitan's `parallelize_fn` applies tensor, context and expert parallelism, activation
checkpointing and FSDP2, to each stage of a pipeline if there is one. With one rank nothing is sharded, and
`pytorch/engine_state.py` keeps the compute copies.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rl.data.packing import PackedRow, pack_row
from rl.system.decoders import DecoderConfig
from rl.system.hf_config import read_decoder_config
from trainer.config import TrainerConfig
from trainer.engines.base import Microbatch
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.pipeline import PipelinedRows
from trainer.engines.pytorch.ranks import choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows
from trainer.engines.titan.model.build import build_model
from trainer.engines.titan.model.row_scorer import RowScorer
from trainer.engines.titan.model.specs import expert_views, named_buffers, named_parameters, share_rope_cache


class TitanEngine(TorchEngine):
    """One rank of a torchtitan model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        shape = self._shape(config.model)
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device)
        self._parts, context_mesh, pipeline = build_model(config, shape, device)
        self._scorer = scorer = RowScorer(config, self._parts[0], context_mesh, device)
        super().__init__(
            config,
            nn.ModuleList(self._parts),
            dict(named_parameters(self._parts)),
            describe_model(config.model, config.head),
            device,
            SequentialRows(scorer.score, config.num_ranks, device)
            if pipeline is None
            else PipelinedRows(scorer, pipeline, config.num_ranks, device),
        )

    def _shape(self, model: Path) -> DecoderConfig:
        """Hook: the shape of the model in this directory, whose `spec` builds it."""
        return read_decoder_config(model)

    @property
    def shares_prefixes(self) -> bool:
        # On a GPU, a shard of a row has no kernel for documents with suffixes.
        computable = self._device.type == "cpu" or self._config.context_parallel == 1
        return computable and self._parts[0].shares_prefixes

    def _pack_row(self, microbatch: Microbatch) -> PackedRow:
        row = super()._pack_row(microbatch)
        return row if self._scorer.takes_shared(row, self._flops) else pack_row(microbatch, share_prefixes=False)

    def _views(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        return expert_views(name, tensor)

    def _buffers(self) -> Mapping[str, Tensor]:
        return dict(named_buffers(self._parts))

    def _move_model(self, device: torch.device) -> None:
        super()._move_model(device)
        share_rope_cache(self._parts)  # moving the model gives each layer its own copy again
