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

    Raises what starting either of them raised.
    """
    trainer, generator = _with_model(trainer, model), _with_model(generator, model)
    # Here, because they load torch and Monarch, which a mistake in a recipe should not have to wait for.
    from controller.generator_handle import GeneratorHandle
    from controller.store import WeightStore
    from controller.trainer_handle import TrainerHandle

    store = await WeightStore.launch(log_dir)
    trainer_task = asyncio.create_task(TrainerHandle.launch(trainer, generator.dtype, log_dir))
    generator_task = asyncio.create_task(GeneratorHandle.launch(generator, log_dir))
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


def _with_model(config: Config, model: Path) -> Config:
    """The configuration for the loop's model. Raises ValueError when it names another."""
    if config.model not in (Path(), model):
        raise ValueError(f"{type(config).__name__}.model is {config.model}; leave it out, the loop's model is {model}")
    return replace(config, model=model)
