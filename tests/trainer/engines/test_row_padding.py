"""Padding changes neither scores nor gradients of a row; on a GPU, datums that share little are computed apart."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl.data.packing import ModelFlops, PackedRow, pack_row, pad_row
from rl.system.hf_config import read_decoder_config
from rl.tiny_models import random_batch, tiny_llama
from trainer.config import TrainerConfig
from trainer.engines.contract.reference import random_groups
from trainer.engines.pytorch.document_attention import segment_mask
from trainer.engines.titan.engine import TitanEngine
from trainer.engines.titan.model import row_scorer
from trainer.engines.titan.model.build import build_model
from trainer.engines.titan.model.row_scorer import RowScorer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# As of Qwen3-8B: 23,552 pairs that attend take as many operations as a token.
FLOPS = ModelFlops(per_token=23552, per_scored=0, per_pair=1)
LONG, SHORT = random_groups([(200, (4000,) * 4)]), random_groups([(1000, (1500,) * 4)])


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


@pytest.mark.parametrize(
    ("batch", "flash", "budget", "shared"),
    [
        # Tokens, padded, and pairs: 16,384 and 35.2e6 or, apart, 16,796 and 35.3e6, which FlashAttention 3 computes in
        # the time of 22e6. So sharing takes 2.3 % less time of FlashAttention 2, and 2.6 % more of FlashAttention 3.
        (LONG, "FA3", 32768, False),
        (LONG, None, 32768, True),
        (LONG, "FA3", 16384, True),  # memory is not planned for 16,796 tokens
        (SHORT, "FA3", 32768, True),  # 7,168 and 11.0e6, or 9,996 and 12.5e6
        (random_groups([(10, (470,))] * 16, opening=20), None, 32768, False),  # 7,684 tokens, padded to 8,192, or 7,984
        (random_groups([(10, (390,))] * 16, opening=100), None, 32768, True),  # 6,656 or 7,984
        (random_batch((3000, 5000)), "FA3", 32768, True),  # nothing is shared: FlashAttention computes the row anyway
    ],
)
def test_gpu_logic_what_saves_too_little_is_not_shared(
    batch: Any, flash: str | None, budget: int, shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(row_scorer, "installed_flash_attention", lambda: flash)
    row = pack_row(batch, share_prefixes=True, share_opening=True)

    def takes_shared(dtype: Any, device: torch.device) -> bool:
        decoder: Any = None
        config = TrainerConfig(model=tmp_path, compute_dtype=dtype, max_tokens_per_microbatch=budget)
        return RowScorer(config, decoder, None, device).takes_shared(row, FLOPS)

    assert takes_shared("bfloat16", GPU) is shared
    assert takes_shared("float32", GPU)  # one kernel computes both, as on a CPU
    assert takes_shared("bfloat16", CPU)


def test_gpu_logic_an_engine_computes_little_shared_datums_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine: Any = TitanEngine(TrainerConfig(model=tiny_llama(tmp_path / "model"), compute_dtype="bfloat16"))
    batch = random_groups([(9, (6, 7)), (20, (50,))])
    shared, apart = (pack_row(batch, share_prefixes=share, share_opening=share) for share in (True, False))
    assert engine._pack_row(batch).documents == shared.documents != apart.documents
    monkeypatch.setattr(engine._scorer, "_device", GPU)
    assert engine._pack_row(batch).documents == apart.documents  # a row for `flex` has at least 129 tokens
