"""What adapters leave on disk: checkpoints, PEFT directories and merged models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama, tiny_qwen3
from rl.types import AdamParams
from tests.trainer.adapters import randomize
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.engines.base import Engine
from trainer.engines.contract.reference import ReferencePolicy
from trainer.engines.pytorch.frozen_base import base_identity

BATCH = random_batch((1, 17, 5, 40))
CONFIG = LoRAConfig(rank=4, alpha=6.0)
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama_tied": tiny_llama,
    "qwen3_untied": lambda path: tiny_qwen3(path, tied=False),
}


def base(model: Path, engine: str = "torchtitan") -> Engine:
    return load_engine(TrainerConfig(model=model, engine=engine, compute_dtype="float32", lora=LoRAConfig()))


def step(engine: Engine) -> None:
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    engine.optim_step(AdamParams(learning_rate=1e-2), 0.01)


def trained_adapter(model: Path, engine: str) -> tuple[Path, Engine]:
    """A model and an adapter over it after a step."""
    adapter = randomize(base(model, engine).adapter("a", CONFIG))
    step(adapter)
    return model, adapter


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


@pytest.fixture(params=[("torchtitan", name) for name in MODELS] + [("fsdp2", "llama_tied")], ids=str)
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Engine]:
    """A model and an adapter over it."""
    engine, name = request.param
    return trained_adapter(MODELS[name](tmp_path / "model"), engine)


def assert_scores_equal(reference: ReferencePolicy, engine: Engine) -> None:
    for datum, logprobs in zip(BATCH, engine.forward([BATCH]).logprobs, strict=True):
        expected = np.where(datum.weights != 0, reference.logprobs(datum).detach(), 0)
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


@pytest.mark.stranger("A7")
def test_a_merged_export_scores_as_the_adapter_does(trained: tuple[Path, Engine], tmp_path: Path) -> None:
    model, adapter = trained
    adapter.export_hf(tmp_path / "export", torch.float32)
    weights = load_file(tmp_path / "export" / "model.safetensors")
    assert weights.keys() == {*load_file(model / "model.safetensors"), "lm_head.weight"}
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is False
    assert_scores_equal(ReferencePolicy(tmp_path / "export"), adapter)


def test_a_model_whose_head_is_not_adapted_stays_tied(llama: Path, tmp_path: Path) -> None:
    adapter = randomize(base(llama).adapter("a", LoRAConfig(rank=4, train_unembed=False)))
    adapter.export_hf(tmp_path / "export", torch.float32)
    assert json.loads((tmp_path / "export" / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "export" / "model.safetensors")
    assert_scores_equal(ReferencePolicy(tmp_path / "export"), adapter)


@pytest.mark.stranger("A7")
def test_peft_loads_an_export_and_scores_as_the_adapter_does(trained: tuple[Path, Engine], tmp_path: Path) -> None:
    model, adapter = trained
    adapter.export_peft(tmp_path / "export", torch.float32)
    reference: Any = ReferencePolicy(model)
    reference.model = peft.PeftModel.from_pretrained(reference.model, tmp_path / "export")
    assert_scores_equal(reference, adapter)
    content = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["use_rslora"]) == (4, 6, False)
    stored = load_file(tmp_path / "export" / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], parameter) for name, parameter in adapter.hf_parameters())


def test_an_adapters_checkpoint_resumes_on_another_engine(llama: Path, tmp_path: Path) -> None:
    adapter = base(llama).adapter("a", CONFIG)
    step(adapter)
    adapter.save_checkpoint(tmp_path / "checkpoint", asynchronous=True)
    step(adapter)
    adapter.wait_for_checkpoint()
    for engine in ("torchtitan", "fsdp2"):
        other = base(llama, engine).adapter("b", LoRAConfig(rank=4, alpha=6.0, seed=7))
        assert other.load_checkpoint(tmp_path / "checkpoint") == 1
        step(other)
        actual = dict(other.hf_parameters())
        for name, expected in adapter.hf_parameters():
            torch.testing.assert_close(actual[name], expected, atol=1e-5, rtol=1e-5)


def test_checkpoints_of_other_models_change_nothing(llama: Path, tmp_path: Path) -> None:
    tuned = tiny_llama(tmp_path / "tuned")
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    whole = load_engine(TrainerConfig(model=llama))
    whole.save_checkpoint(tmp_path / "whole")
    for name, model, config in (("tuned", tuned, CONFIG), ("rank", llama, LoRAConfig(rank=5, alpha=6.0))):
        base(model).adapter("a", config).save_checkpoint(tmp_path / f"{name}_checkpoint")
    adapter = base(llama).adapter("a", CONFIG)
    step(adapter)
    before = [parameter.clone() for _, parameter in adapter.hf_parameters()]
    for name, message in (
        ("tuned_checkpoint", r"an adapter over another model: 'tuned' \(weights \w+\) instead of 'model'"),
        ("rank_checkpoint", "of another model: lora {'rank': 5, "),
        ("whole", "of a whole model; an adapter's is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter.load_checkpoint(tmp_path / name)
    with pytest.raises(ValueError, match="of an adapter; a whole model's is needed"):
        whole.load_checkpoint(tmp_path / "rank_checkpoint")
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, adapter.hf_parameters(), strict=True))
    assert adapter.policy_version == 1


def test_the_identity_of_a_model_is_that_of_its_weights(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert base_identity(tmp_path / "shards")["weights"] == base_identity(llama)["weights"]
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    assert base_identity(tmp_path / "other")["weights"] != base_identity(llama)["weights"]
    assert base_identity(tmp_path / "other")["name"] == "other"
