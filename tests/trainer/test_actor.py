"""What one rank's actor adds to its engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer.actor
from controller.meshes.mesh import Mesh
from controller.meshes.trainer_mesh import ACTOR
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_llama
from rl.types import AdamParams
from tests.meshes_in_process import meshes_in_process
from tests.waiting import wait_until
from trainer.config import TrainerConfig
from trainer.engines import load_engine


def test_the_memory_of_the_first_step_is_touched_once_when_the_first_version_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path / "model")
    config = TrainerConfig(model=model, compute_dtype="float32", moments_dtype="bfloat16")
    touched: list[int] = []
    stops: list[bool] = []

    def touch(num_bytes: int, stopped: Callable[[], bool]) -> None:
        touched.append(num_bytes)
        wait_until(stopped, "the memory to be given back")
        stops.append(stopped())

    monkeypatch.setattr(trainer.actor, "touch", touch)

    async def pushes() -> list[int]:
        arguments = config, "float32", "auto", "weights"
        mesh = await Mesh.spawn("trainer", ACTOR, *arguments, num_ranks=1, env={}, log_dir=tmp_path)
        rank, versions = mesh.rank(0), list[int]()
        try:
            for _ in range(2):
                versions.append((await rank.push_model_state_dict.call_one(None)).version)
            assert not stops
            loss = get_loss("cross_entropy")
            await rank.forward_backward.call_one(None, [random_batch((5, 9))], loss)
            assert stops == [True], "the memory is given back before a step needs it"
            await rank.optim_step.call_one(None, AdamParams(learning_rate=1e-4), 1.0)
            versions.append((await rank.push_model_state_dict.call_one(None)).version)
        finally:
            await mesh.stop()
        return versions

    with meshes_in_process():
        assert asyncio.run(pushes()) == [0, 0, 1]
    engine = load_engine(config)
    assert touched == [sum((4 + 2 + 2) * parameter.numel() for _, parameter in engine.hf_parameters())]
