"""The engine: a datum's log-probs have the same bits in any row, and gradients are torchtitan's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ownloop_bitwise.engine import BitwiseEngine
from ownloop_bitwise.shape import inverse_frequencies, read_shape
from rl.losses import get_loss
from rl.sampling import KeptSets
from rl.tiny_models import SERVABLE, tiny_dense
from rl.types import AdamParams, Datum
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.titan.model.attention import HFRoPE

FAMILIES = ("ernie4_5", "exaone4", "gemma2", "gemma3", "llama", "mistral", "qwen2", "qwen3", "windows")
"""Of the core's table; "windows" is a Mistral with sliding windows."""
VOCABULARY = 64


def make(folder: Path, family: str, **options: Any) -> Path:
    if family == "windows":
        family, options = "mistral", {"sliding_window": 13, **options}
    return tiny_dense(family, folder / family, **{**SERVABLE, **options})


def data(cut: bool = False) -> list[Datum]:
    """Datums of many lengths, some with the same prompt, at two temperatures."""
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCABULARY, n) for n in (1, 5, 16, 33)]
    found: list[Datum] = []
    for i in range(13):
        tokens = np.concatenate([prompts[i % 4], random.integers(3, VOCABULARY, 2 + 3 * i)])
        scored = np.arange(1, len(tokens)) >= len(prompts[i % 4])
        kept = None
        if cut and i % 3:
            sets = [np.unique([*random.integers(0, VOCABULARY, 9), token]) for token in tokens[1:]]
            counts = [len(each) if is_scored else 0 for each, is_scored in zip(sets, scored, strict=True)]
            ids = np.concatenate([each for each, is_scored in zip(sets, scored, strict=True) if is_scored])
            kept = KeptSets(ids, np.cumsum([0, *counts], dtype=np.int64)).compact()
        inputs = {"target_tokens": tokens[1:], "weights": scored.astype(np.float32)}
        inputs["logprobs"] = inputs["advantages"] = random.normal(size=len(scored)).astype(np.float32)
        found.append(Datum(tokens=tokens[:-1], loss_inputs=inputs, temperature=(1.0, 0.7)[i % 2], kept=kept))
    return found


def bits(arrays: Sequence[NDArray[np.float32]]) -> list[bytes]:
    return [each.tobytes() for each in arrays]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_datum_has_the_same_log_probs_alone_in_other_rows_and_without_sharing(
    family: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BitwiseEngine(TrainerConfig(model=make(tmp_path, family), engine="bitwise", compute_dtype=dtype))
    for batch in (data(), data(cut=True)):
        whole = bits(engine.forward([batch]).logprobs)
        assert bits([engine.forward([[datum]]).logprobs[0] for datum in batch]) == whole
        assert bits(engine.forward([batch[5:], batch[:5]]).logprobs) == whole[5:] + whole[:5]
        output = engine.forward_backward([batch], get_loss("importance_sampling", {}))
        assert bits(output.logprobs) == whole
        with monkeypatch.context() as patched:
            patched.setattr(BitwiseEngine, "shares_prefixes", False)
            assert bits(engine.forward([batch]).logprobs) == whole
    before = whole
    engine.optim_step(AdamParams(learning_rate=1e-2))
    after = bits(engine.forward([batch]).logprobs)
    assert before != after
    assert bits([engine.forward([[datum]]).logprobs[0] for datum in batch]) == after


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_reference_computes_what_the_policy_did_at_its_version(dtype: Any, tmp_path: Path) -> None:
    config = TrainerConfig(model=make(tmp_path, "qwen3"), engine="bitwise", compute_dtype=dtype)
    policy, reference = load_engine(config), load_engine(replace(config, frozen=True))
    assert bits(reference.forward([data(cut=True)]).logprobs) == bits(policy.forward([data(cut=True)]).logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropies_and_gradients_are_those_of_other_engines(family: str, tmp_path: Path) -> None:
    model, other = make(tmp_path, family), "fsdp2" if family in ("gemma2", "gemma3", "windows") else "torchtitan"
    ours = BitwiseEngine(TrainerConfig(model=model, engine="bitwise", compute_dtype="float32"))
    theirs = load_engine(TrainerConfig(model=model, engine=other, compute_dtype="float32"))
    batch, loss = data(cut=True), get_loss("importance_sampling", {})
    outputs = [engine.forward([batch], entropy=True) for engine in (ours, theirs)]
    for name in ("logprobs", "entropy"):
        mine, other = (np.concatenate(getattr(output, name)) for output in outputs)
        np.testing.assert_allclose(mine, other, atol=2e-5)
    for engine in (ours, theirs):
        engine.forward_backward([batch], loss)
    expected = {name: parameter.grad for name, parameter in theirs.hf_parameters()}
    for name, parameter in ours.hf_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-3, atol=2e-4 * float(parameter.grad.abs().max())
        )


def test_frequencies_are_those_of_the_core(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
    for options in ({}, {"rope_parameters": scaling}):
        shape = read_shape(make(tmp_path, "llama", **options))
        rope = HFRoPE.Config(dim=shape.head_dim, max_seq_len=8, theta=shape.rope_theta)
        if shape.rope_scaling is not None:
            rope.scaling, rope.scaling_factor, rope.original_max_position_embeddings = "llama", 8.0, 64
            rope.low_freq_factor, rope.high_freq_factor = 1.0, 4.0
        expected = HFRoPE(rope).inverse_frequencies()
        torch.testing.assert_close(torch.tensor(inverse_frequencies(shape, 0)), expected, rtol=1e-6, atol=0)
