"""Starts what a loop needs and ends it again, whatever happens in between."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from generator.config import GeneratorConfig
from rl.protocols import Generator, Trainer
from trainer.config import TrainerConfig

Config = TypeVar("Config", TrainerConfig, GeneratorConfig)


@asynccontextmanager
async def launch(
    model: Path, trainer: TrainerConfig, generator: GeneratorConfig, log_dir: Path
) -> AsyncGenerator[tuple[Trainer, Generator]]:
    """A model's trainer and its generator, started side by side; their processes end with the block.

        async with launch(model, config.trainer, config.generator, log_dir) as (trainer, generator):
            ...

    Raises ValueError, before any process starts, for a model that either of them cannot hold as configured, and
    afterwards whatever starting them raised.
    """
    trainer, generator = _with_model(trainer, model), _with_model(generator, model)
    generator.check_model()
    # Here, because they load torch and Monarch, which a mistake in a recipe should not have to wait for.
    from controller.generator_handle import GeneratorHandle
    from controller.store import WeightStore
    from controller.trainer_handle import TrainerHandle

    TrainerHandle.check_model(trainer)
    trainer_gpus, generator_gpus = assign_gpus(_num_gpus(), trainer.num_ranks, generator.tensor_parallel)
    store = await WeightStore.launch(log_dir)
    trainer_task = asyncio.create_task(TrainerHandle.launch(trainer, generator.dtype, log_dir, gpus=trainer_gpus))
    generator_task = asyncio.create_task(GeneratorHandle.launch(generator, log_dir, gpus=generator_gpus))
    starting = (trainer_task, generator_task)
    try:
        await asyncio.gather(*starting)
        yield trainer_task.result(), generator_task.result()
    finally:
        for task in starting:
            task.cancel()
        started = await asyncio.gather(*starting, return_exceptions=True)
        handles = [handle for handle in started if not isinstance(handle, BaseException)]
        await asyncio.gather(store.stop(), *(handle.stop() for handle in handles))


def assign_gpus(
    num_gpus: int, trainer_ranks: int, generator_ranks: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Which of a host's GPUs the trainer and the generator get: the trainer the first ones, the generator those after.

    On a host with one GPU, a trainer and a generator of one rank each share it. Without GPUs both get None and compute
    on the CPU. Raises ValueError when the GPUs do not suffice.
    """
    if num_gpus == 0:
        return None, None
    if num_gpus == trainer_ranks == generator_ranks == 1:
        return (0,), (0,)
    needed = trainer_ranks + generator_ranks
    if needed > num_gpus:
        raise ValueError(
            f"this host has {num_gpus} GPUs; the trainer has {trainer_ranks} ranks and the generator "
            f"{generator_ranks} (tensor_parallel), which need {needed}"
        )
    return tuple(range(trainer_ranks)), tuple(range(trainer_ranks, needed))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _with_model(config: Config, model: Path) -> Config:
    """The configuration for the loop's model. Raises ValueError when it names another."""
    if config.model not in (Path(), model):
        raise ValueError(f"{type(config).__name__}.model is {config.model}; leave it out, the loop's model is {model}")
    return replace(config, model=model)
