"""Trainer ranks on GPUs, of which one runs out of memory or dies: what is said, what is left, and what starts next."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from controller.handles import trainer_handle
from controller.launching.launcher import Launcher
from controller.processes.errors import MeshError
from generator.config import GeneratorConfig
from rl.losses import get_loss
from rl.tiny_models import random_batch, tiny_qwen3
from rl.types import AdamParams, SamplingParams
from rl.weights.version import PublisherGoneError, WeightsError
from tests.e2e.limited_trainer import leaves_no_memory
from trainer.config import TrainerConfig
from trainer.engines import load_engine

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.gpu, pytest.mark.timeout(300)),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="hardware: needs two CUDA devices"),
]

BATCH = random_batch((128,) * 16)
PARAMS = AdamParams(learning_rate=1e-3)
SHAPE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 1024, "num_hidden_layers": 4}
"""Activations of `BATCH` and moments do not fit into blocks that torch's allocator keeps anyway."""
TWO_RANKS = TrainerConfig(data_parallel_shard=2, compute_dtype="float32")
SERVING = GeneratorConfig(
    weight_transport="gpu_memory",
    max_model_len=64,
    max_num_seqs=4,
    engine_args={"enforce_eager": True, "gpu_memory_utilization": 0.3},
)
MIB = 1 << 20


@asynccontextmanager
async def started(tmp_path: Path, model: Path) -> AsyncGenerator[tuple[Launcher, Any]]:
    """A launcher, and the handle of a trainer of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_handle, "ACTOR", "tests.e2e.limited_trainer:LimitedTrainer")
        async with Launcher(tmp_path / "logs") as launcher:
            yield launcher, await launcher.trainer(model, TWO_RANKS, generator=SERVING)


async def limit(trainer: Any, num_bytes: int | None) -> None:
    """Of rank 0's GPU."""
    await trainer.mesh.call("leave", [(num_bytes,)])


def one_rank(model: Path) -> Any:
    """An engine of this process, after a step on the batch."""
    engine = load_engine(replace(TWO_RANKS, model=model, data_parallel_shard=1))
    engine.forward_backward([BATCH], get_loss("cross_entropy"))
    engine.optim_step(PARAMS)
    return engine


async def test_a_step_or_push_that_one_rank_has_no_memory_for(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", tied=False, **SHAPE)

    async with started(tmp_path, model) as (_, trainer):
        await trainer.forward_backward(BATCH, "cross_entropy")
        await limit(trainer, MIB)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            await trainer.optim_step(PARAMS)
        await limit(trainer, None)
        assert (await trainer.optim_step(PARAMS)).policy_version == 1
        await limit(trainer, 0)
        with pytest.raises(WeightsError, match="not free: CUDA refused: CUDA_ERROR_OUT_OF_MEM"):
            await trainer.push_model_state_dict()
        await limit(trainer, None)
        assert await trainer.push_model_state_dict() == 1
        found = (await trainer.forward(BATCH)).logprobs
        expected = one_rank(model).forward([BATCH]).logprobs
        np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-3)
        await limit(trainer, MIB)
        with pytest.raises(MeshError, match=r"rank 0 \(process \d+\) raised OutOfMemoryError in forward: CUDA out"):
            await trainer.forward(BATCH)


async def test_a_backward_pass_without_memory_ends_what_waits(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", tied=False, **SHAPE)

    async with started(tmp_path, model) as (launcher, trainer):
        failing = asyncio.create_task(trainer.forward_backward(BATCH, get_loss(leaves_no_memory)))
        step = asyncio.create_task(trainer.optim_step(PARAMS))  # rank 0 begins it while rank 1 is in the first
        with pytest.raises(MeshError, match=r"rank 0 .* raised OutOfMemoryError in forward_backward") as caught:
            await failing
        assert "loss_sum.backward()" in "".join(caught.value.__cause__.__notes__)  # pyright: ignore
        with pytest.raises(MeshError, match="raised OutOfMemoryError in forward_backward"):
            await step
        restarted = await launcher.restart_trainer()
        assert await restarted.policy_version() == 0
        await restarted.forward(BATCH)


async def test_a_rank_dies_whose_memory_a_generator_reads(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", tied=False, hidden_size=128, head_dim=64)
    sampling = SamplingParams(max_tokens=4)

    async with started(tmp_path, model) as (launcher, trainer):
        generator = await launcher.generator(model, SERVING)
        await trainer.forward_backward(BATCH, "cross_entropy")
        await trainer.optim_step(PARAMS)
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        running = asyncio.create_task(trainer.forward_backward(BATCH, "cross_entropy"))
        await asyncio.sleep(0)
        os.kill(trainer.mesh.pids[1], signal.SIGKILL)
        with pytest.raises(MeshError, match=r"trainer: rank 1 \(process \d+\) died in forward_backward"):
            await running
        (completion,) = await generator.generate([1, 2, 3], sampling)
        assert completion.versions == (1,) * 4, "it has weights of its own"
        with pytest.raises((PublisherGoneError, MeshError), match=r"is gone|trainer: rank 1 .* died"):
            await generator.pull_model_state_dict(1)  # CUDA has freed the memory that the generator has open
        restarted = await launcher.restart_trainer()
        for _ in range(2):
            await restarted.forward_backward(BATCH, "cross_entropy")
            await restarted.optim_step(PARAMS)
        version = await restarted.push_model_state_dict()
        await generator.pull_model_state_dict(version)
        (completion,) = await generator.generate([1, 2, 3], sampling)
        assert completion.versions == (2,) * 4
