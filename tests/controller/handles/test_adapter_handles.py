"""Handles of several adapters on one mesh: whom a call is about, in which order calls arrive, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller.handles.trainer_handle import TrainerHandle
from rl.lora import LoRAConfig
from rl.protocols import Trainer
from rl.types import AdamParams
from tests.controller.handles.fake_ranks import FakeMesh, handle_of, make, random_batch
from trainer.config import TrainerConfig

ADAM = AdamParams(learning_rate=0.5)


def frozen(tmp_path: Path) -> tuple[TrainerHandle, FakeMesh]:
    handle, _ = make(tmp_path)
    config = TrainerConfig(model=handle.config.model, data_parallel_shard=2, lora=LoRAConfig())
    mesh = FakeMesh(2)
    return handle_of(mesh, config), mesh


async def test_calls_of_all_policies_arrive_in_order_by_name(tmp_path: Path) -> None:
    base, mesh = frozen(tmp_path)

    first = await base.adapter("first", LoRAConfig(rank=8))
    second = await first.adapter("second", LoRAConfig())  # an adapter of the base, not of the first one
    calls: list[Any] = [
        second.forward_backward(random_batch((3, 4)), "ppo"),
        first.forward_backward(random_batch((3, 4)), "ppo"),
        base.forward(random_batch((2,))),
        second.optim_step(ADAM),
        first.zero_grad(),
        second.drop(),
        first.optim_step(ADAM),
    ]
    await asyncio.gather(*map(asyncio.create_task, calls))
    expected = [
        ("adapter", "first"),
        ("adapter", "second"),
        ("forward_backward", "second"),
        ("forward_backward", "first"),
        ("forward", None),
        ("optim_step", "second"),
        ("zero_grad", "first"),
        ("drop", "second"),
        ("optim_step", "first"),
    ]
    for rank in mesh.ranks:
        assert list(zip(rank.calls, rank.policies, strict=True)) == expected


async def test_a_dropped_adapter_refuses_calls_and_frees_its_name(tmp_path: Path) -> None:
    base, mesh = frozen(tmp_path)

    old = await base.adapter("a", LoRAConfig())
    await old.drop()
    batch, path = random_batch((2,)), tmp_path / "x"
    before = mesh.num_calls
    for call in (
        old.forward_backward(batch, "ppo"),
        old.forward(batch),
        old.optim_step(ADAM),
        old.zero_grad(),
        old.to("cpu", model=True),
        old.push_model_state_dict(),
        old.save_checkpoint(path),
        old.wait_for_checkpoint(),
        old.load_checkpoint(path),
        old.policy_version(),
        old.export_hf(path),
        old.export_peft(path),
        old.drop(),
    ):
        with pytest.raises(ValueError, match="adapter 'a' of 'trainer' was dropped; `adapter` makes a new one"):
            await call
    assert mesh.num_calls == before
    new = await base.adapter("a", LoRAConfig())
    await new.zero_grad()


def test_an_impossible_adapter_is_refused_before_a_call(tmp_path: Path) -> None:
    base, mesh = frozen(tmp_path)
    for name, config, message in (
        ("a/b", LoRAConfig(), "adapter's name is 'a/b'"),
        ("a", LoRAConfig(rank=64), r"adapter 'a': rank is 64; the generator serves ranks up to 32 \(GeneratorConfig"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(base.adapter(name, config))
    trainable, other = make(tmp_path)
    with pytest.raises(ValueError, match=r"trains all of its parameters; start it with `TrainerConfig\.lora`"):
        asyncio.run(trainable.adapter("a", LoRAConfig()))
    assert mesh.num_calls == other.num_calls == 0


def test_the_base_is_no_adapter(tmp_path: Path) -> None:
    base, mesh = frozen(tmp_path)
    for call, message in (
        (base.push_model_state_dict(), "the base is frozen.*push an adapter"),
        (base.drop(), "drop: this is the trainer of the model itself; only an adapter"),
        (base.export_peft(tmp_path / "x"), "export_peft: this is the trainer of the model itself"),
    ):
        with pytest.raises(ValueError, match=message):
            asyncio.run(call)
    assert mesh.num_calls == 0


async def test_a_failure_of_all_ranks_leaves_other_adapters_alone(tmp_path: Path) -> None:
    base, mesh = frozen(tmp_path)

    first: Trainer = await base.adapter("first", LoRAConfig())
    second: Trainer = await base.adapter("second", LoRAConfig())
    for rank in mesh.ranks:
        rank.error = ValueError("optim_step was called without a gradient")
    with pytest.raises(ValueError, match="without a gradient"):
        await first.optim_step(ADAM)
    for rank in mesh.ranks:
        rank.error = None
    assert (await second.optim_step(ADAM)).policy_version == 7
    assert (await first.optim_step(ADAM)).policy_version == 7
