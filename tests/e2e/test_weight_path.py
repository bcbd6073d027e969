"""What runs for a push and a pull between real meshes: how much of the controller, and the way that docs show."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controller.handles import generator_handle, trainer_handle
from controller.launching.launcher import launch
from generator.config import GeneratorConfig
from rl.tiny_models import tiny_llama
from tests.call_tracing import TracedCall, check_hops, traced_calls
from trainer.config import TrainerConfig

pytestmark = pytest.mark.e2e

MOST_FILES = 8
"""Files of the controller that a pull passes."""


def test_a_weight_goes_the_way_that_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_handle, "ACTOR", "tests.e2e.traced_trainer:TracedTrainer")
    monkeypatch.setattr(generator_handle, "ACTOR", "tests.e2e.traced_generator:TracedGenerator")
    model = tiny_llama(tmp_path / "model", hidden_size=128, num_attention_heads=4, num_kv_heads=2)
    trainer_config = TrainerConfig(compute_dtype="float32")
    generator_config = GeneratorConfig(dtype="float32", max_model_len=64)

    async def main() -> tuple[list[TracedCall], list[TracedCall]]:
        async with launch(model, trainer_config, generator_config, tmp_path / "logs") as (trainer, generator):
            handles: tuple[Any, Any] = trainer, generator
            meshes = [handles[0].mesh, handles[1]._replicas[0].generator.mesh]
            await generator.pull_model_state_dict(await trainer.push_model_state_dict())  # later ones repeat its copies
            for mesh in meshes:
                await mesh.call("trace", [()])
            with traced_calls("controller") as push:
                version = await trainer.push_model_state_dict()
            with traced_calls("controller") as pull:
                await generator.pull_model_state_dict(version)
            there = [call for mesh in meshes for calls in await mesh.call("traced", [()]) for call in calls]
            return pull, [*push, *pull, *there]

    pull, calls = asyncio.run(main())
    check_hops("The way of a weight", calls)
    files = {call.file for call in pull}
    assert len(files) <= MOST_FILES, sorted(files)
