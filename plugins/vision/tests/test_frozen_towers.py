"""A vision tower that is not trained is pushed as a checkpoint has it."""

import asyncio
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ownloop_vision.tiny_vl import tiny_qwen3_vl
from plugins.vision.tests.vision import WORDS, image_batch
from rl.losses import get_loss
from rl.types import AdamParams
from tests.stores import FakeStore, living, read_buffer
from trainer.actor import PolicyTrainer, PublishedEngine
from trainer.config import TrainerConfig
from trainer.engines import load_engine
from trainer.push import WeightPublisher


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
