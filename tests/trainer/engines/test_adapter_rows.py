"""The rows that an adapter computes are those of its model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.data.packing import PackedRow
from rl.lora import LoRAConfig
from rl.tiny_models import tiny_llama
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.reference import random_groups
from trainer.engines.pytorch.row_runner import OutputCollector


def test_an_adapter_shares_what_its_model_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, add = list[PackedRow](), OutputCollector.add

    def remember(self: OutputCollector, row: PackedRow, *others: Any) -> None:
        rows.append(row)
        add(self, row, *others)

    monkeypatch.setattr(OutputCollector, "add", remember)
    engine = load_engine(TrainerConfig(model=tiny_llama(tmp_path), compute_dtype="float32", lora=LoRAConfig()))
    adapter = engine.adapter("one", LoRAConfig(rank=4))
    batch = random_groups([(3, (4, 4)), (2, (5,))], opening=8)
    of_model, of_adapter = engine.forward([batch]), adapter.forward([batch])
    assert rows[0].documents == rows[1].documents
    assert rows[1].documents[-1].opening == 8
    for ours, theirs in zip(of_adapter.logprobs, of_model.logprobs, strict=True):  # a new adapter changes nothing
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
