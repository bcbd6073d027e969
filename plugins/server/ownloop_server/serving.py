"""Runs a server: a trainer of the frozen base and a generator for each model, and the gateway before them."""

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import shutil
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

import uvicorn

from controller.handles.adapters import BoundGenerator
from controller.handles.generator_router import GeneratorRouter
from controller.launching.launcher import Launcher
from controller.runs.restarts import RestartLimit
from generator.config import LoRALimits
from generator.openai_calls import OpenAICall, OpenAIReply
from ownloop_server.answers import Throughput
from ownloop_server.app import make_app
from ownloop_server.config import ModelOptions, ServeConfig, is_this_host, model_options
from ownloop_server.gateway import Gateway
from ownloop_server.image_chunks import image_reader
from ownloop_server.keys import Keys, needs_keys
from ownloop_server.recovery import RecoveringAdapter, RestartingTrainer, Snapshots
from ownloop_server.replica_calls import openai
from ownloop_server.served_models import Places, ServedModel, WholeModels
from ownloop_server.status import log
from ownloop_server.web import Server, listen
from rl import protocols
from rl.lora import LoRAConfig
from rl.protocols import Trainer
from rl.system.hardware import without_walking_what_exists
from rl.system.hf_config import inspect_model

LOG_BYTES = 64 * 2**20
"""The size at which another file of request lines is begun."""
NUM_OLD_LOGS = 2
KEEP_ALIVE_S = 75
"""How long a connection without requests stays open. A client that sends just as it closes sees a broken pipe."""
Say = Callable[[str], None]
_ADAPTERS_AT_ONCE = 8


async def serve(config: ServeConfig, models: Mapping[str, Path], say: Say) -> None:
    """Serves until it is cancelled. `say` prints where, and who trains what.

    `models` are the directories by the names after `--model`. Raises ValueError if the address or the folder is taken,
    and for what trainer and generator refuse, before any process starts.
    """
    keys = Keys(config.folder)
    needs_key = needs_keys(config, keys)
    with (
        held(config.folder),
        listen(config.host, config.port) as listener,
        request_log(config.folder / "logs" / "requests.log"),
    ):
        async with contextlib.AsyncExitStack() as stack:
            gateway = Gateway(await host(stack, config, models, say), config.folder, say)
            say(f"serving {', '.join(gateway.models.names)}; checkpoints and logs go to {config.folder}")
            options = uvicorn.Config(
                make_app(gateway, keys, config.limits, needs_key=needs_key),
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                lifespan="on",
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
            )
            for line in invitation(config, listener, needs_key=needs_key):
                say(line)
            # as late as possible: what exists by now is never walked again
            stack.enter_context(without_walking_what_exists())
            await Server(options).serve_until_cancelled(listener)


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Within the block, a folder is this server's alone. Raises ValueError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:  # the file stays; the lock goes with the process, however it ends
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"folder {folder} is in use by another server; --folder names another one") from None
        yield


def invitation(config: ServeConfig, listener: socket.socket, *, needs_key: bool) -> list[str]:
    """What clients and people need to know to use the server."""
    host, port = listener.getsockname()[:2]
    # 0.0.0.0 is no address that a client can use
    name = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else f"[{host}]" if ":" in host else host
    scheme = "http" if config.tls_certificate is None else "https"
    key = "the key of `ownloop key add`" if needs_key else "tml-local"
    lines = [f"clients: export TINKER_BASE_URL={scheme}://{name}:{port} TINKER_API_KEY={key}"]
    if not is_this_host(config.host) and config.tls_certificate is None:
        lines.append(
            "keys and data cross the network unencrypted: give --tls-certificate and --tls-key, or use a tunnel"
        )
    return lines


@contextlib.contextmanager
def request_log(file: Path) -> Generator[None]:
    """Within the block, `monitoring` writes its lines to this file, and older ones are in `<file>.1` and so on."""
    handler = RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=NUM_OLD_LOGS)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False  # the console is for people; a line per request is for the log
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


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
    # room for the largest; smaller adapters are padded
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
    read_image = image_reader(model, config.limits.image_folder)
    whole = WholeModels(launcher, config, options, vocab_size, throughput, places, read_image)
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
        read_image=read_image,
        whole=whole.begin if config.full else None,
        throughput=throughput,
    )


async def _openai(options: ModelOptions, router: protocols.Generator) -> Callable[[OpenAICall], Awaitable[OpenAIReply]]:
    """What answers requests in OpenAI's form. Raises ValueError for parsers that vLLM cannot use."""
    assert isinstance(router, GeneratorRouter), "of one generator too"

    async def answer(call: OpenAICall) -> OpenAIReply:
        return await openai(router, options.parse(call))

    if options.tool_parser or options.reasoning_parser:  # an empty request has vLLM look for them now
        await answer(OpenAICall(kind="chat", body=b"{}", policy=None, model=options.names[0]))
    return answer
