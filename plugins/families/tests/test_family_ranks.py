"""Ranks of a family compute what one does, an adapter's export is what was scored, and a checkpoint resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams
from tests.architectures import MODELS
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.contract.plain_ranks import LENGTHS, plan, relative_error, spawn, whole
from trainer.engines.contract.reference import ReferencePolicy, published

NAMES = ("gpt_oss", "qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3", "gemma4", "gemma2")


TITAN = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5", "qwen3_5_moe")
EXPERTS_OF_TWO = {"data_parallel_shard": 4, "expert_parallel": 2}
EXPERTS_IN_TENSORS = {"tensor_parallel": 2, "expert_parallel": 2}


def gradients(rank: int, model: Path, ranks: int, result: Path) -> None:
    config = TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32", data_parallel_shard=ranks)
    engine, batch = load_engine(config), random_batch(LENGTHS)
    local = plan(config, batch).split(batch)[config.data_parallel_rank(rank)]
    engine.forward_backward(local, get_loss("importance_sampling"))
    found = whole(engine, gradients=True)
    if rank == 0:
        torch.save(found, result)


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path, name: str) -> None:
    model = MODELS[name][1](tmp_path / "model")
    gradients(0, model, 1, tmp_path / "one")
    spawn(2, gradients, model, 2, tmp_path / "two")
    one, two = (torch.load(tmp_path / which) for which in ("one", "two"))
    assert one.keys() == two.keys()
    errors = {key: relative_error(two[key], one[key]) for key in one}
    decays = {key: error for key, error in errors.items() if key.endswith(("A_log", "dt_bias"))}
    assert max(error for key, error in errors.items() if key not in decays) < 1e-5
    assert max(decays.values(), default=0) < 1e-4


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "fsdp2") for name in NAMES), *((name, "torchtitan") for name in TITAN)]
)
def test_an_adapter_is_trained_and_exported_merged(tmp_path: Path, name: str, engine: str) -> None:
    lora = LoRAConfig(rank=4, train_mlp=name in ("gemma2", "gemma4", "qwen3_5"))
    config = TrainerConfig(model=MODELS[name][1](tmp_path / "model"), engine=engine, compute_dtype="float32", lora=lora)
    adapter = load_engine(config).adapter("a", lora)
    batch = random_batch((9, 17, 5))
    adapter.forward_backward([batch], get_loss("cross_entropy"))
    adapter.optim_step(AdamParams(learning_rate=1e-2))
    adapter.export_hf(tmp_path / "merged", torch.float32)
    reference = ReferencePolicy(tmp_path / "merged")
    changed = ReferencePolicy(config.model).logprobs(batch[0]) - reference.logprobs(batch[0])
    assert float(changed.detach().abs().max()) > 1e-2
    for logprobs, datum in zip(adapter.forward([batch]).logprobs, batch, strict=True):
        scored = datum.weights > 0
        assert logprobs[scored] == pytest.approx(reference.logprobs(datum).detach().numpy()[scored], abs=5e-5)


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
