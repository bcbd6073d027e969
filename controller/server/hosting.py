"""Starts what each model of a server needs: a trainer of the frozen base, and a generator."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from controller.handles.adapters import BoundGenerator
from controller.handles.generator_router import GeneratorRouter
from controller.handles.openai_router import openai
from controller.launching.launcher import Launcher
from controller.runs.restarts import RestartLimit
from controller.server.config import ServeConfig
from controller.server.model_options import ModelOptions, model_options
from controller.server.recovery import RecoveringAdapter, RestartingTrainer
from controller.server.served_model import ServedModel
from controller.server.snapshots import Snapshots
from controller.server.throughput import Throughput
from controller.server.whole_models import Places, WholeModels
from generator.config import LoRALimits
from generator.openai_calls import OpenAICall, OpenAIReply
from rl.hf_config import inspect_model
from rl.lora import LoRAConfig
from rl.protocols import Generator, Trainer

Say = Callable[[str], None]
_ADAPTERS_AT_ONCE = 8


async def host(
    stack: AsyncExitStack, config: ServeConfig, models: Mapping[str, Path], say: Say
) -> Sequence[ServedModel]:
    """Starts the processes of all models side by side. They end with `stack`.

    `models` are as for `model_options`. Raises as `Launcher` does, before any process starts.
    """
    options = model_options(config, models)
    shutil.rmtree(config.folder / "recovery", ignore_errors=True)  # of a server that was killed
    first = await stack.enter_async_context(Launcher(config.folder / "logs"))
    others = [Launcher(config.folder / "logs", beside=first) for _ in range(len(models) - 1)]
    launchers = [first, *[await stack.enter_async_context(other) for other in others]]
    places = Places(config.full)
    starts = [
        _host_one(stack, launcher, config, of_model, "" if index == 1 else f"-{index}", places, say)
        for index, (launcher, of_model) in enumerate(zip(launchers, options, strict=True), start=1)
    ]
    return await asyncio.gather(*starts)


async def _host_one(
    stack: AsyncExitStack,
    launcher: Launcher,
    config: ServeConfig,
    options: ModelOptions,
    suffix: str,
    places: Places,
    say: Say,
) -> ServedModel:
    model = options.directory
    at_once = min(_ADAPTERS_AT_ONCE, config.max_snapshots)
    limits = LoRALimits(max_rank=config.max_rank, max_adapters=at_once, max_loaded=config.max_snapshots)
    generator_config = replace(config.generator, lora=limits)
    trainer_config = replace(config.trainer, lora=LoRAConfig(rank=config.max_rank))
    policy, generator = await asyncio.gather(
        launcher.trainer(model, trainer_config, name=f"trainer{suffix}", generator=generator_config),
        launcher.generator(model, generator_config, name=f"generator{suffix}"),
    )
    assert isinstance(generator, BoundGenerator), "with `lora` it is"
    base = await launcher.reference(model, trainer_config)
    await policy.drop()  # a loop's adapter; here every client makes its own
    restart = partial(launcher.restart_trainer, f"trainer{suffix}")
    trainer = RestartingTrainer(base, restart, RestartLimit(config), say)

    async def adapter(name: str, lora: LoRAConfig) -> Trainer:
        return await RecoveringAdapter.make(trainer, name, lora, config.folder / "recovery" / name)

    throughput, vocab_size = Throughput(), inspect_model(model).vocab_size
    whole = WholeModels(launcher, config, options, vocab_size, throughput, places)
    stack.push_async_callback(whole.close)
    return ServedModel(
        names=options.names,
        tokenizer=str(model),
        adapter=adapter,
        generator=generator.unbound,
        openai=await _openai(options, generator.unbound),
        max_rank=config.max_rank,
        max_context=generator_config.max_model_len,
        vocab_size=vocab_size,
        snapshots=Snapshots(generator.unbound, config.max_snapshots),
        whole=whole.begin if config.full else None,
        throughput=throughput,
    )


async def _openai(options: ModelOptions, router: Generator) -> Callable[[OpenAICall], Awaitable[OpenAIReply]]:
    """What answers requests in OpenAI's form. Raises ValueError for parsers that vLLM cannot use."""
    assert isinstance(router, GeneratorRouter), "of one generator too"

    async def answer(call: OpenAICall) -> OpenAIReply:
        return await openai(router, options.parse(call))

    if options.tool_parser or options.reasoning_parser:  # an empty request has vLLM look for them now
        await answer(OpenAICall(kind="chat", body=b"{}", policy=None, model=options.names[0]))
    return answer
