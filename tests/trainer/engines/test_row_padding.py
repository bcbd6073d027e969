"""A row that is padded by more than the model's context has the scores and gradients of the row alone."""

from pathlib import Path

import torch

from rl.data.packing import PackedRow, pack_row, pad_row
from rl.tiny_models import random_batch, tiny_llama
from trainer.config import TrainerConfig
from trainer.engines.decoder_config import read_decoder_config
from trainer.engines.pytorch.document_attention import segment_mask
from trainer.engines.titan.model.build import build_model
from trainer.engines.titan.model.row_scorer import RowScorer

CPU = torch.device("cpu")


def test_padding_beyond_the_context_changes_nothing(tmp_path: Path) -> None:
    config = TrainerConfig(model=tiny_llama(tmp_path / "model"), compute_dtype="float32")
    decoder = read_decoder_config(config.model)
    (model,), context_mesh, _ = build_model(config, decoder, CPU)
    scorer = RowScorer(config, model, context_mesh, CPU)

    def scores_and_gradients(row: PackedRow) -> list[torch.Tensor]:
        scores, _ = scorer.score(row, entropy=False)
        gradients = torch.autograd.grad((scores * torch.arange(len(scores))).sum(), list(model.parameters()))
        return [scores, *gradients]

    row = pack_row(random_batch((5, 40, 17)), share_prefixes=False)
    padded = pad_row(row, 512)
    assert len(padded.tokens) - len(row.tokens) > 2 * decoder.max_seq_len
    for ours, alone in zip(scores_and_gradients(padded), scores_and_gradients(row), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-5)


def test_no_token_attends_to_another_document_of_padding() -> None:
    padded = pad_row(pack_row(random_batch((5,)), share_prefixes=False), 300)
    index = torch.arange(300)
    mask = segment_mask(padded.documents, CPU)
    allowed = mask(torch.tensor(0), torch.tensor(0), index[:, None], index[None])
    # The documents are told apart by their positions, which is how `varlen` does it.
    document = torch.from_numpy(padded.positions == 0).cumsum(0)
    assert torch.equal(allowed, (document[:, None] == document[None]).tril())
