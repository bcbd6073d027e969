"""How the ranks of a context-parallel group share a row, checked position by position."""

import pytest
import torch

from rl.data.packing import Document
from trainer.config import TrainerConfig
from trainer.engines.titan.context import context_masks, document_mask, row_multiple, share_row

DOCUMENTS = (Document(5), Document(3, (4, 0, 2)), Document(1), Document(9))
LENGTH = 24


def owners() -> list[tuple[int, int]]:
    """Document and branch (0 is the trunk) of every token."""
    return [
        (index, branch)
        for index, document in enumerate(DOCUMENTS)
        for branch, size in enumerate((document.trunk, *document.branches))
        for _ in range(size)
    ]


def may_attend(query: int, key: int) -> bool:
    """Word by word what a packed row promises."""
    (document, branch), (key_document, key_branch) = owners()[query], owners()[key]
    return key <= query and document == key_document and key_branch in (0, branch)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shares_are_equal_balanced_and_cover_the_row(num_ranks: int) -> None:
    scored = torch.tensor([0, 7, 7, 8, 23, 11])
    shares = [share_row(LENGTH, scored, rank, num_ranks) for rank in range(num_ranks)]
    assert torch.equal(torch.cat([share.rows for share in shares]), shares[0].order)
    assert sorted(shares[0].order.tolist()) == list(range(LENGTH))
    assert len({int((share.rows + 1).sum()) for share in shares}) == 1, "causal attention costs each rank as much"
    assert sorted(torch.cat([share.where for share in shares]).tolist()) == list(range(len(scored)))
    for share in shares:
        assert torch.equal(share.rows[share.scored], scored[share.where])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_masks_of_a_share_are_those_of_the_row(num_ranks: int) -> None:
    for rank in range(num_ranks):
        share = share_row(LENGTH, torch.tensor([0]), rank, num_ranks)
        masks = context_masks(DOCUMENTS, share)
        assert torch.equal(share.order[masks.restore], torch.arange(LENGTH))
        allowed = torch.zeros(len(share.rows), LENGTH, dtype=torch.bool)
        first = 0
        for piece in masks.pieces:
            allowed[first : first + piece.size, piece.first_key : piece.last_key] = piece.mask
            first += piece.size
        expected = [[may_attend(int(query), key) for key in range(LENGTH)] for query in share.rows]
        assert torch.equal(allowed, torch.tensor(expected))


def test_a_document_mask_may_begin_anywhere() -> None:
    document = DOCUMENTS[1]
    whole = document_mask(document, 0, document.num_tokens)
    assert torch.equal(document_mask(document, 2, 6), whole[2:6, :6])


def test_rows_divide_evenly() -> None:
    cpu = torch.device("cpu")
    assert row_multiple(TrainerConfig(tensor_parallel=2), cpu) == 1
    assert row_multiple(TrainerConfig(tensor_parallel=2, expert_parallel=2), cpu) == 2
    assert row_multiple(TrainerConfig(tensor_parallel=2, context_parallel=2), cpu) == 8
    assert row_multiple(TrainerConfig(float8="rowwise"), cpu) == 16
    assert row_multiple(TrainerConfig(float8="rowwise", tensor_parallel=3, pipeline_parallel=2), cpu) == 48
