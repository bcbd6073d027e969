"""From packed rows to the inputs of torchtitan's decoders, and from their outputs to the scores of whole rows."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl.data.packing import ModelFlops, PackedRow, pad_row
from trainer.config import TrainerConfig
from trainer.engines.pytorch.context_parallel import RowShard, gather_scored, shard_row
from trainer.engines.pytorch.distribution import Distribution
from trainer.engines.pytorch.document_attention import installed_flash_attention
from trainer.engines.pytorch.pipeline import StageInputs
from trainer.engines.pytorch.ranks import DTYPES
from trainer.engines.pytorch.row_runner import to_tensor, with_routes
from trainer.engines.titan.model.attention import needs_flex, sharded_attention_masks
from trainer.engines.titan.model.specs import Policy

_BLOCK = 128  # positions per block of a block mask, on a GPU
# Times that `flex`, which is Triton, takes as long as FlashAttention 3: 395 and 648 TFLOP/s of an H100 (arXiv
# 2407.08608, figure 5: forward, heads of 128). FlashAttention 2 reaches 370 there, about as many as `flex`.
_FLEX_TIME = 1.6
_FLOAT8_MULTIPLE = 16  # torchao's float8 kernels need the inner size of a product to be a multiple of this


class RowScorer:
    """One rank's forward pass over packed rows. Under context parallelism a rank computes its shard of each row."""

    def __init__(
        self, config: TrainerConfig, decoder: Policy, context_mesh: DeviceMesh | None, device: torch.device
    ) -> None:
        """`decoder` is the whole model, or the first of this rank's pipeline stages."""
        self._decoder = decoder
        self._context_mesh = context_mesh
        self._device = device
        self._row_multiple = row_multiple(config, device)
        self._compute_dtype = DTYPES[config.compute_dtype]
        self._head_dtype = config.head_dtype
        self._max_tokens = config.max_tokens_per_microbatch

    def takes_shared(self, row: PackedRow, flops: ModelFlops) -> bool:
        """Whether a row takes less time as it was packed than its datums apart, or these do not fit a micro-batch.

        Where one kernel computes both, sharing takes less. On a GPU in bfloat16, operations are compared: the row is
        padded for `flex`, and each operation of its attention counts as often as `flex` is slower.
        """
        apart = sum(row.lengths)
        one_kernel = self._device.type == "cpu" or self._compute_dtype != torch.bfloat16
        if one_kernel or not needs_flex(row.documents, self._compute_dtype) or apart > self._max_tokens:
            return True
        flex_time = 1.0 if installed_flash_attention() is None else _FLEX_TIME
        fewer_tokens = apart - row_length(len(row.tokens), self._row_multiple)
        more_pairs = flex_time * float((row.positions + 1).sum()) - sum(n * (n + 1) / 2 for n in row.lengths)
        return (2 if flops.frozen else 3) * flops.per_token * fewer_tokens >= 3 * flops.per_pair * more_pairs

    def score(self, row: PackedRow, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """A `ScoreRow`, for a decoder that is the whole model."""
        inputs, shard = self.inputs(row, entropy=entropy)
        scores, entropies = self._decoder(inputs.tokens, **inputs.others)
        whole = self.whole(scores, shard, len(row.scored))
        return whole, None if entropies is None else self.whole(entropies, shard, len(row.scored))

    def inputs(self, row: PackedRow, *, entropy: bool) -> tuple[StageInputs, RowShard | None]:
        """Returns what the model takes, and this rank's shard of the row under context parallelism."""
        row = self._padded(row)
        tokens, positions = to_tensor(row.tokens, self._device), to_tensor(row.positions, self._device)
        scored = to_tensor(row.scored, self._device)
        targets = to_tensor(row.targets, self._device)
        distribution = Distribution.of_row(row, self._device, self._head_dtype)
        if self._context_mesh is None:
            shard, rows = None, slice(None)
            masks = self._decoder.plan(positions[None], row.documents, self._compute_dtype)
        else:
            shard = shard_row(len(tokens), scored, self._context_mesh.get_local_rank(), self._context_mesh.size())
            rows, scored, targets = shard.rows, shard.scored, targets[shard.where]
            distribution = distribution.at(shard.where)
            masks = sharded_attention_masks(self._decoder, positions[None], row.documents, shard, self._context_mesh)
        others: Mapping[str, object] = {
            "positions": positions[rows][None],
            "attention_masks": with_routes(masks, row, self._device, rows),
            "scored": scored,
            "targets": targets,
            "entropy": entropy,
            "distribution": distribution,
        }
        return StageInputs(tokens[rows][None], others), shard

    def _padded(self, row: PackedRow) -> PackedRow:
        """A row of a length that the layout can cut and, for `flex` on a GPU, that has often been compiled before."""
        flex = self._context_mesh is not None or needs_flex(row.documents, self._compute_dtype)
        if self._device.type == "cpu" or not flex:
            return pad_row(row, self._row_multiple)
        return pad_row(row, row_length(len(row.tokens), self._row_multiple))

    def whole(self, scores: Tensor, shard: RowShard | None, num_scored: int) -> Tensor:
        """[p] scores of this rank's shard -> [P] of the whole row. A collective if there are shards."""
        if self._context_mesh is None or shard is None:
            return scores
        return gather_scored(scores, shard, num_scored, self._context_mesh.get_group())


def row_multiple(config: TrainerConfig, device: torch.device) -> int:
    """The number of which a row's length must be a multiple, for equal shards and for float8."""
    if config.context_parallel == 1:
        # Experts take their tokens from equal parts of the sequence, and stages exchange equal parts. On a GPU, DTensor
        # replicates a row of fewer tokens than ranks for RMSNorm's fused kernel, which torchtitan refuses.
        parts = config.num_token_shards
        # The gradient of a float8 weight sums over tokens, which its kernel takes in multiples.
        return math.lcm(parts, _FLOAT8_MULTIPLE if config.float8 != "none" else 1)
    block = 1 if device.type == "cpu" else _BLOCK
    return 2 * config.context_parallel * config.tensor_parallel * block


def row_length(length: int, multiple: int) -> int:
    """The length to which a row of this many tokens is padded for a kernel that is compiled for its lengths.

    There are at most 8 lengths between a number and its double, so that a run soon has seen all of them; less than an
    eighth of a row is padding, apart from the padding to `multiple`. Every row has two blocks or more: for one
    `flex` is compiled again, and below one it takes a kernel for decoding, which cannot compute grouped heads.
    """
    length = max(length, _BLOCK + 1)
    step = 1 << max(0, length.bit_length() - 4)
    stepped = -(-length // step) * step
    return -(-stepped // multiple) * multiple
