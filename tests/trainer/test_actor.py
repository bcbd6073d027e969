"""What one rank's actor adds to its engine."""

import asyncio
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ownloop_vision.tiny_vl import tiny_qwen3_vl
from plugins.vision.tests.vision import WORDS, image_batch
from rl.losses import get_loss
from rl.system.hardware import cpu_thread_env
from rl.types import AdamParams
from tests.stores import FakeStore, living, read_buffer
from trainer.actor import PolicyTrainer, PublishedEngine
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.push import WeightPublisher

_PUSHES = """
import asyncio, os, threading, torch
from tests.stores import FakeStore
from trainer.push import WeightPublisher

def num_threads_of_libgomp():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())

async def main():
    weights = {name: torch.ones(512, 512) for name in "abcd"}
    torch.add(weights["a"], weights["a"])
    before = num_threads_of_libgomp()
    publisher = WeightPublisher(torch.bfloat16, "shared_memory", store=FakeStore())
    for version in (1, 2, 3):
        await publisher.publish(version, weights.items())
    print(before, num_threads_of_libgomp() - before)

asyncio.run(main())
"""


@pytest.mark.seconds
def test_a_push_computes_on_no_further_thread() -> None:
    """Each Python thread that computes has its own threads of libgomp's; too many make all wait in a worse way."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PUSHES],
        env={**os.environ, **cpu_thread_env(2)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split()[1] == "0"


@pytest.mark.seconds
def test_frozen_weights_of_a_loaded_checkpoint_are_pushed(tmp_path: Path) -> None:
    """Of a vision tower that an earlier run has trained."""
    model, store = tiny_qwen3_vl(tmp_path / "model", WORDS), FakeStore()
    config = TrainerConfig(model=model, engine="fsdp2", compute_dtype="float32")
    earlier = load_engine(replace(config, train_vision=True))
    earlier.forward_backward([image_batch(model)], get_loss("importance_sampling"))
    earlier.optim_step(AdamParams(learning_rate=1e-2))
    earlier.save_checkpoint(tmp_path / "checkpoint")
    actor: Any = PolicyTrainer(config, "float32", "shared_memory")
    engine = actor._policies[None].engine
    actor._policies[None] = PublishedEngine(engine, WeightPublisher(torch.float32, store=store))

    def call(endpoint: Any, *arguments: Any) -> None:
        asyncio.run(inspect.unwrap(endpoint._method)(actor, *arguments))

    for _ in range(3):
        call(PolicyTrainer.push_model_state_dict, None)
    call(PolicyTrainer.load_checkpoint, None, tmp_path / "checkpoint", True)
    call(PolicyTrainer.push_model_state_dict, None)
    published = read_buffer(living(store)[-1])
    assert published.keys() > set(engine.frozen_names) > set()
    assert all(torch.equal(published[name], parameter) for name, parameter in earlier.hf_parameters())
