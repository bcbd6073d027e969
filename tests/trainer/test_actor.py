"""What one rank's actor adds to its engine."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer.actor
from controller.handles.trainer_mesh import ACTOR
from controller.processes.mesh import Mesh
from rl.losses import get_loss
from rl.system.hardware import cpu_thread_env
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
