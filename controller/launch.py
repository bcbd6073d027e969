"""Starts what a loop needs and ends it again, whatever happens in between."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from controller.generator_handle import GeneratorHandle
from controller.store import WeightStore
from controller.trainer_handle import TrainerHandle
from generator.config import GeneratorConfig
from trainer.config import TrainerConfig


@asynccontextmanager
async def launch(
    model: Path, trainer: TrainerConfig, generator: GeneratorConfig, log_dir: Path
) -> AsyncGenerator[tuple[TrainerHandle, GeneratorHandle]]:
    """A model's trainer and its generator, started side by side; their processes end with the block.

        async with launch(model, config.trainer, config.generator, log_dir) as (trainer, generator):
            ...

    Raises what starting either of them raised.
    """
    trainer, generator = replace(trainer, model=model), replace(generator, model=model)
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
