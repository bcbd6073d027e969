"""`ownloop chat RUN|MODEL [--step N]`: a conversation in the terminal with a run's model, or with any model.

Producer: a thread that reads lines. Consumer: the loop below, which waits for a line and then for the answer. The end
of the input (Ctrl-D) ends the conversation, and Ctrl-C the command.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from controller.commands.command import Commands, add_run_options
from controller.commands.output import CapturedOutput
from controller.commands.recipes import override

if TYPE_CHECKING:
    from generator.config import GeneratorConfig
    from rl.protocols import Generator
    from rl.rollouts.rendering import Renderer

_MAX_CONTEXT = 4096


def add_parser(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("chat", help="talk to a run's model, or to any model", allow_abbrev=False)
    parser.add_argument("model", metavar="RUN|MODEL", help="a run, or whatever --model takes")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 for the most probable answer (default: 0.7)")
    parser.add_argument("--system", help="a system message, if the model's chat template knows them")
    add_run_options(parser)
    parser.set_defaults(command=chat)


def chat(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Answers line by line. `overrides` are fields of the generator's configuration."""
    from controller.commands.processes import CommandEndedError, finish
    from rl.types import SamplingParams

    SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)  # refuses what cannot be sampled
    with CapturedOutput() as output, tempfile.TemporaryDirectory(prefix="ownloop-chat-") as scratch:

        def tell(text: str) -> None:
            print(text, file=output.errors)

        try:
            finish(_chat(options, overrides, Path(scratch), tell, output.terminal), output)
        except CommandEndedError as ended:
            return ended.status
    return 0


async def _chat(
    options: argparse.Namespace, overrides: Sequence[str], scratch: Path, tell: Callable[[str], None], terminal: TextIO
) -> None:
    from controller.commands.eval_run import model_of
    from controller.launching.launcher import Launcher
    from controller.runs.models import resolve_model
    from rl.rollouts.rendering import Renderer

    model = resolve_model(await model_of(options, scratch, tell), tell)
    config = override(_generator_config(model), overrides, "ownloop chat")
    renderer = Renderer(model, config.max_model_len)
    tell("starting the generator")
    async with Launcher(scratch / "logs") as launcher:
        generator = await launcher.generator(model, config)
        tell("an empty line begins a new conversation, Ctrl-D ends")
        await converse(generator, renderer, options, tell, terminal)


def _generator_config(model: Path) -> "GeneratorConfig":
    """One conversation at a time, in the dtype that suits the hardware."""
    from controller.processes.place import gpus_here
    from generator.config import GeneratorConfig
    from rl.system.hardware import cpu_dtype
    from rl.system.hf_config import inspect_model

    context = min(inspect_model(model).max_context, _MAX_CONTEXT)
    return GeneratorConfig(dtype="bfloat16" if gpus_here() else cpu_dtype(), max_model_len=context, max_num_seqs=1)


async def converse(
    generator: "Generator",
    renderer: "Renderer",
    options: argparse.Namespace,
    tell: Callable[[str], None],
    terminal: TextIO,
) -> None:
    """Answers every line of the standard input until its end.

    A model without a chat template continues each line as it stands. An empty line begins a new conversation, and so
    does a conversation that no longer fits into the context.
    """
    from rl.types import SamplingParams

    system = [{"role": "system", "content": options.system}] if options.system else []
    chat = list(system)
    if not renderer.has_chat_template:
        tell("the model has no chat template: it continues each line as it stands")
    lines = _lines()
    while (line := await lines.get()) is not None:
        if not line.strip():
            chat = list(system)
            continue
        chat.append({"role": "user", "content": line})
        tokens = renderer.encode(chat if renderer.has_chat_template else line)
        room = (renderer.max_model_len or _MAX_CONTEXT) - len(tokens)
        if room < 1:
            tell("the conversation is longer than the context; a new one begins")
            chat = list(system)
            continue
        sampling = SamplingParams(max_tokens=min(options.max_tokens, room), temperature=options.temperature)
        (answer,) = await generator.generate(tokens, sampling)
        print(answer.text.strip(), file=terminal, flush=True)
        chat.append({"role": "assistant", "content": answer.text})


def _lines() -> "asyncio.Queue[str | None]":
    """The lines of the standard input, as they come; None is its end. The thread dies with the process."""
    queue: asyncio.Queue[str | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(queue.put_nowait, line.rstrip("\n"))
        loop.call_soon_threadsafe(queue.put_nowait, None)

    threading.Thread(target=read, daemon=True, name="standard input").start()
    return queue
