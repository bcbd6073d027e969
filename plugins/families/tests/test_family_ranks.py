"""Ranks of a family compute what one does, an adapter's export is what was scored, and a checkpoint resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ownloop_families.tiny import TINY_FAMILIES as MODELS
from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams
from tests.trainer.engines.test_ranks_of_architectures import assert_adapter_is_exported_merged, assert_two_ranks_as_one
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import relative_error, spawn
from trainer.engines.contract.reference import published

NAMES = ("gpt_oss", "qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "gemma4")


TITAN = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_5_moe")
EXPERTS_OF_TWO = {"data_parallel_shard": 4, "expert_parallel": 2}
EXPERTS_IN_TENSORS = {"tensor_parallel": 2, "expert_parallel": 2}


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path, name: str) -> None:
    assert_two_ranks_as_one(MODELS[name][1](tmp_path / "model"), tmp_path, unbounded=("A_log", "dt_bias"))


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "fsdp2") for name in NAMES), *((name, "torchtitan") for name in TITAN)]
)
def test_an_adapter_is_trained_and_exported_merged(tmp_path: Path, name: str, engine: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    assert_adapter_is_exported_merged(model, engine, tmp_path, train_mlp=name in ("gemma4", "qwen3_5"))


def push_export_and_save(rank: int, model: Path, layout: dict[str, Any], folder: Path) -> None:
    engine = load_engine(TrainerConfig(model=model, compute_dtype="float32", **layout))
    engine.forward_backward([[]], get_loss("cross_entropy"))
    engine.optim_step(AdamParams(learning_rate=0.0))
    pushed = published(1, engine.hf_parameters())
    if rank == 0:
        save_file(pushed, folder / "pushed.safetensors")
    engine.export_hf(folder / "exported", torch.float32)
    engine.save_checkpoint(folder / "checkpoint")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, each) for name in TITAN if name != "qwen3_5" for each in (EXPERTS_OF_TWO, EXPERTS_IN_TENSORS)),
        *(("qwen3_5", {which: 2}) for which in ("data_parallel_shard", "tensor_parallel")),
    ],
)
def test_ranks_push_export_and_save_the_whole_model(tmp_path: Path, name: str, layout: dict[str, int]) -> None:
    model = MODELS[name][1](tmp_path / "model")
    ranks = max(layout.values())
    spawn(ranks, push_export_and_save, model, layout, tmp_path)
    expected = load_file(model / "model.safetensors")
    one = load_engine(TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32"))
    one.load_checkpoint(tmp_path / "checkpoint")
    saved = {key: parameter.detach() for key, parameter in one.hf_parameters()}
    for found in (
        load_file(tmp_path / "pushed.safetensors"),
        load_file(tmp_path / "exported/model.safetensors"),
        saved,
    ):
        assert found.keys() == expected.keys()
        assert [key for key, weight in expected.items() if not torch.equal(weight, found[key])] == []


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_layers_choose_the_same_experts(tmp_path: Path, kind: Any) -> None:
    model, batch = MODELS["deepseek_v3"][1](tmp_path / "model"), random_batch((9, 17, 5))
    engines = [
        load_engine(TrainerConfig(model=model, compute_dtype="float32", activation_checkpointing=each))
        for each in ("none", kind)
    ]
    expected, found = ({name: p.clone() for name, p in engine.hf_parameters()} for engine in engines)
    assert expected.keys() == found.keys()
    assert [name for name, parameter in expected.items() if not torch.equal(parameter, found[name])] == []
    for a, b in zip(*(engine.forward([batch]).logprobs for engine in engines), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", TITAN)
def test_a_checkpoint_resumes_and_fits_the_other_engine(tmp_path: Path, name: str) -> None:
    configs = [
        TrainerConfig(model=MODELS[name][1](tmp_path / which), engine=which, compute_dtype="float32")
        for which in ("torchtitan", "torchtitan", "fsdp2")
    ]
    first, second, other = (load_engine(config) for config in configs)
    batch, loss = random_batch((9, 17, 5)), get_loss("cross_entropy")
    for step in range(2):
        if step == 1:
            first.save_checkpoint(tmp_path / "checkpoint")
            assert (
                second.load_checkpoint(tmp_path / "checkpoint") == other.load_checkpoint(tmp_path / "checkpoint") == 1
            )
        for engine in (first, second, other)[: 3 if step else 1]:
            engine.forward_backward([batch], loss)
            engine.optim_step(AdamParams(learning_rate=1e-2))
    resumed, elsewhere = dict(second.hf_parameters()), dict(other.hf_parameters())
    for key, parameter in first.hf_parameters():
        assert torch.equal(resumed[key], parameter), key
        assert relative_error(elsewhere[key], parameter) < 1e-4, key
    for a, b in zip(first.forward([batch]).logprobs, second.forward([batch]).logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
