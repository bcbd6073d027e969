"""Runs one script on several engine ranks over gloo, without Monarch, and returns what rank 0 saw."""

import asyncio
import contextlib
import resource
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.losses import LossInputs, get_loss
from rl.tiny_models import random_batch
from rl.types import AdamParams, Datum
from tests.stores import FakeStore, living, read_buffer
from tests.trainer.adapters import load_engine_or_adapter
from tests.trainer.reference import random_groups
from trainer.config import TrainerConfig
from trainer.engines.base import Engine
from trainer.engines.plain_ranks import LENGTHS, plan, spawn, whole
from trainer.push import WeightPublisher

PARAMS = AdamParams(learning_rate=1e-2, grad_clip_norm=0.5, weight_decay=0.1)


def run(config: TrainerConfig, directory: Path) -> dict[str, Any]:
    """Results of `script` on all ranks of a layout; with one rank, in this process."""
    if config.num_ranks == 1:
        return script(config, 0, directory)
    spawn(config.num_ranks, _save_results, config, directory)
    return torch.load(directory / "results.pt", weights_only=False)


def _save_results(rank: int, config: TrainerConfig, directory: Path) -> None:
    results = script(config, rank, directory)
    if rank == 0:
        torch.save(results, directory / "results.pt")


def script(config: TrainerConfig, rank: int, directory: Path) -> dict[str, Any]:
    """What is compared between layouts: gradients, a failing loss, three steps, a checkpoint and an export."""
    engine = load_engine_or_adapter(config)
    index = config.data_parallel_rank(rank)
    results: dict[str, Any] = {}
    batch = random_batch(LENGTHS)
    alike = random_groups([(3, (5, 6)), (2, (4,)), (1, (3,)), (4, (2, 2))], opening=10)

    def local_batch(data: list[Datum]) -> list[list[Datum]]:
        return plan(config, data).split(data)[index]

    output = engine.forward_backward(local_batch(batch[:4]), get_loss("importance_sampling"))
    results["logprobs"], results["metrics"] = output.logprobs, output.metrics
    engine.forward(local_batch(batch))  # leaves the gradient as it is
    engine.forward_backward(local_batch(batch[4:5]), get_loss("importance_sampling"))  # fewer datums than ranks
    engine.forward_backward(local_batch(alike), get_loss("importance_sampling"))
    results["gradients"] = whole(engine, gradients=True)

    try:
        engine.forward_backward(local_batch(batch), get_loss(fail_on_the_longest))
    except (ArithmeticError, RuntimeError) as error:
        results["error"] = f"{type(error).__name__}: {error}"
    results["gradients_after_error"] = whole(engine, gradients=True)

    try:
        engine.optim_step(replace(PARAMS, learning_rate_multipliers={"model.layers.9.*": 1.0}), 0.1)
    except ValueError as error:
        results["unmatched"] = str(error)
    # Of a pipeline, one rank holds layer 0.
    steps = [engine.optim_step(replace(PARAMS, learning_rate_multipliers={"*model.layers.0.*": 1.0}), 0.1)]
    for _ in range(2):
        engine.forward(local_batch(batch))  # gathers parameters, which must not outlive the step
        engine.forward_backward(local_batch(batch), get_loss("cross_entropy"))
        steps.append(engine.optim_step(replace(PARAMS, grad_clip_norm=0.0), 0.01))
    results["grad_norms"] = [step.grad_norm for step in steps]
    results["parameters"] = whole(engine)
    engine.save_checkpoint(directory / "checkpoint", asynchronous=True)  # while the ranks go on below
    engine.export_hf(directory / "export", torch.float32)
    if config.lora is not None:
        engine.export_peft(directory / "export_peft", torch.float32)
    results["published"] = published(engine)
    results["forward"] = engine.forward(local_batch(batch), entropy=True)

    fail_to_write(engine, rank, config.num_ranks, directory)
    engine.forward_backward(local_batch(batch), get_loss("cross_entropy"))
    engine.optim_step(PARAMS)
    assert engine.load_checkpoint(directory / "checkpoint") == 3
    results["loaded"] = whole(engine)
    return results


def fail_to_write(engine: Engine, rank: int, num_ranks: int, directory: Path) -> None:
    """One rank has no room for its files; every rank raises, and the checkpoint that was there stays."""
    engine.wait_for_checkpoint()
    with no_space(rank == num_ranks - 1), pytest.raises(OSError, match="checkpoint could not be written: rank"):
        engine.save_checkpoint(directory / "checkpoint")
    with no_space(rank == 0), pytest.raises(Exception, match="File too large"):
        engine.export_hf(directory / "export", torch.float32)


@contextlib.contextmanager
def no_space(applies: bool) -> Generator[None]:
    """Within the block, this process cannot write files of more than 100 bytes, if `applies`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if applies else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def published(engine: Engine) -> dict[str, torch.Tensor]:
    """What a push of the engine's parameters leaves for generators; on rank 0."""
    store = FakeStore()
    asyncio.run(WeightPublisher(torch.float32, store=store).publish(3, engine.hf_parameters()))
    return read_buffer(living(store)[-1]) if store.values else {}


def fail_on_the_longest(logprobs: torch.Tensor, entropy: torch.Tensor | None, inputs: LossInputs) -> object:
    """Raises on one rank only."""
    if len(logprobs) >= 40 * 2 // 3:
        raise ArithmeticError("the longest datum is here")
    return -logprobs.sum(), {}
