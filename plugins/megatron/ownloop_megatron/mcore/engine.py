"""The megatron engine: Megatron-core's decoder, with its tensor and expert parallelism, driven by our loop.

Gradients, AdamW, failures, offload and checkpoints are as in every engine on PyTorch, because Megatron-core's own
work on CUDA only. Stages of a pipeline are run by torch's schedules, as torchtitan's are. TransformerEngine is
not used.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ownloop_megatron.mcore.core_model import Stage, build_model
from ownloop_megatron.mcore.groups import make_groups
from ownloop_megatron.mcore.layers import plan_documents, plan_shard
from ownloop_megatron.mcore.masters import MasterSlices, ShardedMasters, by_name
from rl.data.packing import PackedRow, pad_row
from rl.system.hf_config import read_decoder_config
from trainer.config import TrainerConfig
from trainer.engines.model_check import describe_model
from trainer.engines.pytorch.context_parallel import RowShard, gather_scored, shard_row
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.engine import TorchEngine
from trainer.engines.pytorch.hf_directory import load_hf_weights
from trainer.engines.pytorch.pipeline import Pipeline, PipelinedRows, StageInputs
from trainer.engines.pytorch.ranks import choose_device, init_process_group
from trainer.engines.pytorch.row_runner import SequentialRows, to_tensor, with_routes


class MegatronEngine(TorchEngine):
    """One rank of a Megatron-core model."""

    def __init__(self, config: TrainerConfig) -> None:
        """Builds and loads the model. Raises ValueError for a model or a layout that cannot be trained."""
        decoder = read_decoder_config(config.model)
        device = choose_device()
        torch.manual_seed(config.seed)
        init_process_group(config, device, alone=True)  # Megatron-core needs a process group even for one rank
        groups = make_groups(config, device)
        stages, named = build_model(config, decoder, groups, device)
        sharded = config.data_parallel_replicate == 1 and dist.get_world_size(groups.data) > 1
        self._masters = ShardedMasters(named, groups) if sharded else MasterSlices(named, groups)
        with torch.no_grad():
            load_hf_weights(dict(by_name(self._masters)), config.model)  # into the masters, which are float32
        self._masters.refresh()
        scorer = RowScorer(stages[0], config, groups.context, device)
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

    def _reduce_gradients(self) -> None:
        self._masters.reduce_gradients()

    def zero_grad(self) -> None:
        super().zero_grad()
        self._masters.drop_gradients()


class RowScorer:
    """One rank's forward pass over packed rows. Under context parallelism a rank computes its shard of each row."""

    def __init__(self, stage: Stage, config: TrainerConfig, context: dist.ProcessGroup, device: torch.device) -> None:
        """`stage` is the whole model, or the first of this rank's pipeline stages; `context` shares rows."""
        self._stage = stage
        self._context = context
        self._num_shards, self._head_dtype = config.context_parallel, config.head_dtype
        self._row_multiple = config.num_token_shards * (1 if self._num_shards == 1 else 2 * self._num_shards)
        self._device = device

    def score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """A `ScoreRow`, for a stage that is the whole model."""
        inputs, shard = self.inputs(row, entropy=entropy)
        scores, entropies = self._stage(inputs.tokens, **inputs.others)
        whole = self.whole(scores, shard, len(row.scored))
        return whole, None if entropies is None else self.whole(entropies, shard, len(row.scored))

    def inputs(self, row: PackedRow, *, entropy: bool) -> tuple[StageInputs, RowShard | None]:
        """Returns what every stage takes, and this rank's shard of the row under context parallelism."""
        row = pad_row(row, self._row_multiple)
        tokens, positions = to_tensor(row.tokens, self._device), to_tensor(row.positions, self._device)
        scored = to_tensor(row.scored, self._device)
        targets = to_tensor(row.targets, self._device)
        distribution = Distribution.of_row(row, self._device, self._head_dtype)
        shard = None
        if self._num_shards == 1:
            plan = plan_documents(row.documents, self._device)
        else:
            shard = shard_row(len(tokens), scored, dist.get_rank(self._context), self._num_shards)
            plan = plan_shard(row.documents, shard, self._context)
            tokens, positions = tokens[shard.rows], positions[shard.rows]
            scored, targets, distribution = shard.scored, targets[shard.where], distribution.at(shard.where)
        others: dict[str, object] = {
            "positions": positions[None],
            "plan": with_routes(plan, row, self._device, slice(None) if shard is None else shard.rows),
            "scored": scored,
            "targets": targets,
            "entropy": entropy,
            "distribution": distribution,
        }
        return StageInputs(tokens[None], others), shard

    def whole(self, scores: Tensor, shard: RowShard | None, num_scored: int) -> Tensor:
        """[p] scores of this rank's shard -> [P] of the whole row. A collective if there are shards."""
        return scores if shard is None else gather_scored(scores, shard, num_scored, self._context)
