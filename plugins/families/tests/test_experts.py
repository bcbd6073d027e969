"""Layers of experts: what the engine torchtitan, adapters, optimizers and handles do with them.

Tests of the core's engine that are imported here run with a model that has experts.
"""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from rl.lora import LoRAConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch as random_datums
from rl.tiny_models import tiny_qwen3_moe
from tests.controller.handles.fake_ranks import FakeMesh, handle_of, random_batch
from tests.trainer.engines.test_adapter_files import (
    test_a_merged_export_scores_as_the_adapter_does,
    test_peft_loads_an_export_and_scores_as_the_adapter_does,
    trained_adapter,
)
from tests.trainer.engines.test_adapters import base, step, tensors
from tests.trainer.engines.test_bfloat16 import assert_ranks_round_no_more_than_one
from tests.trainer.engines.test_engine import (
    build,
    gradients,
    test_every_gradient_equals_autograd,
    test_logprobs_and_entropy_equal_transformers,
    test_what_datums_share_changes_no_gradient,
)
from tests.trainer.engines.test_muon import assert_layouts_take_the_steps_of_one_rank
from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.contract.reference import routed

__all__ = [
    "test_a_merged_export_scores_as_the_adapter_does",
    "test_every_gradient_equals_autograd",
    "test_logprobs_and_entropy_equal_transformers",
    "test_peft_loads_an_export_and_scores_as_the_adapter_does",
    "test_what_datums_share_changes_no_gradient",
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_qwen3_moe(tmp_path / "model")


@pytest.fixture
def trained(model: Path) -> tuple[Path, Engine]:
    return trained_adapter(model, "torchtitan")


def test_experts_are_not_adapted(model: Path) -> None:
    frozen = base(model)
    adapter = frozen.adapter("a", LoRAConfig(rank=4))
    assert {name.split(".")[-3] for name in tensors(adapter)} == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
    step(adapter)
    with pytest.raises(ValueError, match="experts are not adapted, so train_attn or train_unembed must be True"):
        frozen.adapter("b", LoRAConfig(train_attn=False, train_unembed=False))


@pytest.mark.parametrize("engine", ["torchtitan", "fsdp2"])
def test_equal_calls_give_equal_gradients(tmp_path: Path, engine: str) -> None:
    """Several threads add what a token gets from its four experts."""
    model = tiny_qwen3_moe(tmp_path / "model", num_experts_per_tok=4)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, other = (build(model, engine=engine) for _ in range(2))
        for each in (one, other):
            each.forward_backward([random_datums([60] * 8)], get_loss("importance_sampling"))
    finally:
        torch.set_num_threads(num_threads)
    expected = gradients(other)
    assert all(grad.equal(expected[name]) for name, grad in gradients(one).items())


@pytest.mark.ranks
def test_ranks_with_experts_take_the_steps_of_one_rank(model: Path, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"data_parallel_shard": 2, "expert_parallel": 2}
    assert_layouts_take_the_steps_of_one_rank(model, {"experts": layout}, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("names", [("fsdp2", "tp2_ep2"), pytest.param(("cp2", "pp2"), marks=pytest.mark.slow)])
def test_gpu_logic_several_ranks_round_no_more_than_one(tmp_path: Path, names: tuple[str, ...]) -> None:
    # Every token goes to all experts, because rounding may choose another one, which changes whole gradients.
    model = tiny_qwen3_moe(tmp_path / "model", num_experts_per_tok=4, tie_word_embeddings=False)
    assert_ranks_round_no_more_than_one(model, names, tmp_path)


def test_gpu_logic_experts_are_scored_in_float32_on_every_device() -> None:
    """GPUs do so by autocast, which a CPU ignores: in bfloat16 it would send tokens to other experts."""
    importlib.import_module("trainer.engines.titan.model")  # applies the patches
    from ownloop_families.titan.experts import RouterGate

    torch.manual_seed(0)
    gate = RouterGate.Config(in_features=64, out_features=4).build().bfloat16()
    x = torch.randn(1, 9, 64).bfloat16()
    scores = gate(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, linear(x.double(), gate.weight.double()).float())
    scores.sum().backward()
    assert gate.weight.grad.dtype == torch.bfloat16


def test_only_the_policy_replays_experts(model: Path) -> None:
    batch = routed(random_batch((3, 17, 5, 12, 9, 1)), (2, 2, 4))
    for options, replays in (({}, True), ({"frozen": True}, False), ({"head": "value"}, False)):
        config = TrainerConfig(model=model, **options)  # pyright: ignore[reportArgumentType]
        mesh = FakeMesh(1)
        asyncio.run(handle_of(mesh, config).forward(batch))
        sent = [datum.routes is not None for microbatch in mesh.ranks[0].microbatches[0] for datum in microbatch]
        assert sent == [replays] * len(batch)
    other = handle_of(FakeMesh(1), TrainerConfig(model=model, engine="fsdp2"))
    with pytest.raises(ValueError, match="'fsdp2' replays no routes; use one of the engines torchtitan"):
        asyncio.run(other.forward(batch))
