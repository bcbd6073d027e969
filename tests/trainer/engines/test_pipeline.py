"""Rows in a pipeline give the same output and gradient as rows one after the other. Here the pipeline has one stage.

That stages on several ranks agree with one rank is tested in test_sharded_engine.py.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl.data.packing import PackedRow, pack_row
from rl.losses import LossInputs, get_loss
from rl.system.hf_config import read_decoder_config
from rl.tiny_models import random_batch, tiny_qwen3
from trainer.config import TrainerConfig
from trainer.engines.base import PeakMemory
from trainer.engines.pytorch.pipeline import Pipeline, PipelinedRows, StageInputs
from trainer.engines.pytorch.row_runner import OutputCollector, RowRunner, SequentialRows
from trainer.engines.titan.model.build import build_model
from trainer.engines.titan.model.row_scorer import RowScorer

CPU = torch.device("cpu")
ROWS = [pack_row(batch, share_prefixes=False) for batch in ([*random_batch((9, 4))], [*random_batch((17,), seed=1)])]


class OneStage:
    """A pipeline whose only stage is the whole model. Its schedule takes at least four micro-batches."""

    is_last = True

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def num_microbatches(self, count: int) -> int:
        return max(count, 4)

    def run(self, rows: Sequence[StageInputs], loss: Callable[[Tensor, int], Tensor] | None) -> list[Tensor]:
        assert len(rows) >= 4
        outputs: list[Tensor] = []
        for index, row in enumerate(rows):
            results = self._decoder(row.tokens, **row.others)
            outputs.append(torch.stack([values for values in results if values is not None]))
            if loss is not None:
                loss(outputs[-1], index).backward()
        return outputs


@pytest.fixture
def runners(tmp_path: Path) -> tuple[nn.Module, RowRunner, RowRunner]:
    """A model, and it computing rows one after the other and in a pipeline."""
    config = TrainerConfig(model=tiny_qwen3(tmp_path / "model", tied=False), compute_dtype="float32")
    decoder = build_model(config, read_decoder_config(config.model), CPU).parts[0]
    scorer = RowScorer(config, decoder, None, CPU)
    pipelined = PipelinedRows(scorer, cast("Pipeline", OneStage(decoder)), 1, CPU)
    return decoder, SequentialRows(scorer.score, 1, CPU), pipelined


def collector(*, entropy: bool = False) -> OutputCollector:
    return OutputCollector(PeakMemory(CPU), "lm", entropy=entropy)


def gradient(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0], None, ROWS[1]]])
def test_a_pipeline_changes_neither_output_nor_gradient(
    runners: tuple[nn.Module, RowRunner, RowRunner], rows: Sequence[PackedRow | None]
) -> None:
    model, *both = runners
    results: list[Any] = []
    for runner in both:
        trained, scored = collector(), collector(entropy=True)
        runner.accumulate(rows, get_loss("importance_sampling", None), trained)
        with torch.no_grad():
            runner.forward(rows, scored, entropy=True)
        results.append((trained.result(), scored.result(), gradient(model)))
    (trained, scored, grads), (trained_too, scored_too, grads_too) = results
    assert trained.metrics["loss"] == pytest.approx(trained_too.metrics["loss"], rel=1e-6)
    assert len(trained.logprobs) == len(trained_too.logprobs) == 3
    for a, b in zip((*trained.logprobs, *scored.entropy), (*trained_too.logprobs, *scored_too.entropy), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert grads
    for a, b in zip(grads, grads_too, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_behind_a_loss_that_raises_still_go_through(runners: tuple[nn.Module, RowRunner, RowRunner]) -> None:
    calls: list[int] = []

    def fails(logprobs: Tensor, entropy: Tensor | None, inputs: LossInputs) -> object:
        calls.append(len(logprobs))
        raise ArithmeticError("my own mistake")

    _, _, pipelined = runners
    with pytest.raises(ArithmeticError, match="my own mistake"):
        pipelined.accumulate(ROWS, get_loss(fails, None), collector())
    assert len(calls) == 1
