"""Which sentence follows from which mismatches, and what is refused before a process starts."""

import json
import shutil
from pathlib import Path

import pytest

from ownloop_doctors.mismatch import (
    ADAPTER_CAUSE,
    CAUSES,
    DTYPE_CAUSE,
    EXPERTS_CAUSE,
    HEAD_CAUSE,
    explain,
)
from ownloop_doctors.vocabulary import compare_tokenizers
from tests.controller.commands.test_cli import RECIPE, ownloop
from tests.generator.served_models import served_llama

MODEL, DTYPE, HEAD = list(CAUSES), [DTYPE_CAUSE], [HEAD_CAUSE, DTYPE_CAUSE]


@pytest.mark.parametrize(
    ("means", "causes", "stepped", "sentence"),
    [
        ([3e-6, 3e-6, 2e-6, 2e-6], MODEL, 3e-6, "There is no mismatch to explain: 3.00e-06"),
        ([0.9, 0.03, 0.03, 0.03, 1e-6], MODEL + DTYPE, 0.03, "of 9.00e-01 is explained, 97% by sampling away from"),
        ([0.9, 0.9, 0.03, 0.03, 1e-6], MODEL + DTYPE, 0.03, "97% by the generator's weights"),
        (
            [0.9, 0.4, 0.0, 0.0],
            MODEL,
            0.0,
            "56% by sampling away from the model's own distribution (temperature,",
        ),
        ([0.9, 0.4, 0.0, 0.0], MODEL, 0.0, "; 44% by the generator's weights"),
        ([0.2, 0.2, 0.2, 1e-6], MODEL, 0.2, "100% by packing"),
        ([0.03, 0.03, 0.03, 0.03, 1e-6], MODEL + DTYPE, 0.04, "100% by the dtype: in float32 both sides agree."),
        ([0.03, 0.03, 0.03, 0.03, 0.02], MODEL + DTYPE, 0.04, "33% by the dtype: in float32 both sides agree; 67% by "),
        (
            [0.03, 0.03, 0.03, 0.03, 0.03],
            MODEL + DTYPE,
            0.04,
            "None of these explains the mismatch of 3.00e-02; 3.00",
        ),
        (
            [0.03, 0.03, 0.03, 0.03, 0.02, 1e-6],
            MODEL + HEAD,
            0.03,
            "67% by the dtype: in float32 both sides agree; 33",
        ),
        ([3e-6, 3e-6, 3e-6, 3e-6], MODEL, 0.5, "the pulled weights are not the trainer's"),
        ([0.04, 0.01, 0.01, 0.01, 0.01], [EXPERTS_CAUSE, *MODEL], 0.01, "75% by the experts: the trainer's layers cho"),
        ([0.2, 0.2, 0.2, 0.2, 1e-6], [*MODEL, ADAPTER_CAUSE], 0.2, "100% by the adapter: over the frozen model alone"),
    ],
)
def test_the_causes_are_what_closed_the_mismatch(
    means: list[float], causes: list[str], stepped: float, sentence: str
) -> None:
    assert sentence in explain(means, stepped, 0.9, causes)


@pytest.mark.parametrize(
    ("pulled", "stepped", "step", "stale"),
    [
        (3e-6, 2e-4, 0.9, True),  # in float32 a small part of the step is seen
        (0.01, 0.03, 0.9, False),  # in bfloat16 a surer model is rounded more
        (0.01, 0.03, 0.2, True),
        (0.01, 0.3, 0.9, True),
    ],
)
def test_stale_weights_leave_a_part_of_the_step(pulled: float, stepped: float, step: float, stale: bool) -> None:
    explanation = explain([0.04, *[pulled] * 4], stepped, step, [EXPERTS_CAUSE, *MODEL])
    assert ("the pulled weights are not the trainer's" in explanation) == stale


def test_another_tokenizer_is_named(tmp_path: Path) -> None:
    model = served_llama(tmp_path / "model", tied=True)
    other = shutil.copytree(model, tmp_path / "other")
    assert compare_tokenizers(model, other) == []
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    (sentence,) = compare_tokenizers(model, other)
    assert sentence == f"The tokenizers of {model} and {other} read 2 tokens differently."


def test_a_recipe_without_two_sides_is_refused(tmp_path: Path) -> None:
    result = ownloop(tmp_path, "parity", str(RECIPE))
    assert result.returncode == 2
    assert result.stderr == (
        "error: a ToyConfig has no model, trainer, generator, sampling, env: there are not two sides to compare\n"
    )
