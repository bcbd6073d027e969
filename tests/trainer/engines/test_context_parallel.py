"""How the ranks of a context-parallel group share a row, checked position by position."""

import pytest
import torch

from rl.data.packing import Document
from tests.rl.data.row_definition import attended
from trainer.config import TrainerConfig
from trainer.engines.pytorch.block_attention import document_mask
from trainer.engines.pytorch.context_parallel import attend_in_context, context_masks, shard_row
from trainer.engines.titan.model.row_scorer import row_multiple

DOCUMENTS = (Document(5), Document(3, (4, 0, 2)), Document(2, (2, 1, 2), depths=(1, 2, 1)), Document(6), Document(9))
LENGTH = 36


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shares_are_equal_balanced_and_cover_the_row(num_ranks: int) -> None:
    scored = torch.tensor([0, 7, 7, 8, 23, 11])
    shards = [shard_row(LENGTH, scored, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([shard.rows for shard in shards]), shards[0].order)
    assert sorted(shards[0].order.tolist()) == list(range(LENGTH))
    assert len({int((shard.rows + 1).sum()) for shard in shards}) == 1, "causal attention costs each rank as much"
    assert sorted(torch.cat([shard.where for shard in shards]).tolist()) == list(range(len(scored)))
    for shard in shards:
        assert torch.equal(shard.rows[shard.scored], scored[shard.where])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_masks_of_a_share_are_those_of_the_row(num_ranks: int) -> None:
    for rank in range(num_ranks):
        shard = shard_row(LENGTH, torch.tensor([0]), rank, num_ranks)
        masks = context_masks(DOCUMENTS, shard)
        assert torch.equal(shard.order[masks.restore], torch.arange(LENGTH))
        allowed = torch.zeros(len(shard.rows), LENGTH, dtype=torch.bool)
        first = 0
        for piece in masks.pieces:
            assert piece.mask is not None
            allowed[first : first + piece.size, piece.first_key : piece.last_key] = piece.mask
            first += piece.size
        assert torch.equal(allowed, torch.from_numpy(attended(DOCUMENTS))[shard.rows])


def test_gpu_logic_attention_without_masks_is_that_with_masks() -> None:
    documents, generator = (Document(7), Document(1), Document(12)), torch.Generator().manual_seed(0)
    shard = shard_row(20, torch.tensor([0]), 1, 2)
    masks = context_masks(documents, shard)
    without = masks._replace(pieces=tuple(piece._replace(mask=None) for piece in masks.pieces))
    q = torch.randn(1, 10, 4, 8, generator=generator)
    k, v = (torch.randn(1, 20, 2, 8, generator=generator) for _ in range(2))
    expected = attend_in_context(q, k, v, masks, scale=0.3)
    torch.testing.assert_close(attend_in_context(q, k, v, without, scale=0.3), expected)


def test_a_document_mask_may_begin_anywhere() -> None:
    for document in DOCUMENTS[1:3]:
        whole = torch.from_numpy(attended([document]))
        assert torch.equal(document_mask(document, 2, 6), whole[2:6, :6])


def test_rows_divide_evenly() -> None:
    cpu = torch.device("cpu")
    assert row_multiple(TrainerConfig(tensor_parallel=2), cpu) == 2  # a rank without work computes a row of one token
    assert row_multiple(TrainerConfig(tensor_parallel=2, sequence_parallel=False), cpu) == 1
    assert row_multiple(TrainerConfig(tensor_parallel=2, expert_parallel=2), cpu) == 2
    assert row_multiple(TrainerConfig(tensor_parallel=2, context_parallel=2), cpu) == 8
    assert row_multiple(TrainerConfig(float8="rowwise"), cpu) == 16
    assert row_multiple(TrainerConfig(float8="rowwise", tensor_parallel=3, pipeline_parallel=2), cpu) == 48
