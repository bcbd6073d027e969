"""`ownloop chat` and `ownloop eval`: answers of a run's model, or of any model.

In a conversation a thread reads lines; `converse` waits for a line and then for its answer. The end of the input
(Ctrl-D) ends the conversation, and Ctrl-C the command.
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from tyro.conf import Positional, arg

from controller.commands.command import OfCheckpoint, TakesFields
from controller.commands.output import CapturedOutput
from controller.commands.processes import finish
from controller.commands.recipes import override, runnable_configuration
from controller.commands.saved_recipe import run_of
from controller.runs.folder import began_at, complete_checkpoints
from controller.runs.loop_config import options_of
from rl.types import SamplingParams

if TYPE_CHECKING:
    from controller.launching.launcher import Launcher
    from controller.runs.console import Console
    from generator.config import GeneratorConfig
    from rl.protocols import Generator
    from rl.rollouts.evaluation import Evaluation
    from rl.rollouts.rendering import Renderer

_MAX_CONTEXT = 4096
_NEEDED = ("env", "generator", "sampling", "num_eval")


@dataclass(frozen=True, kw_only=True)
class Chat(OfCheckpoint, TakesFields):
    """Talks to a run's model, or to any model.

    --field value sets a field of the generator's configuration.
    """

    model: Annotated[str, Positional, arg(metavar="RUN|MODEL")]
    """A run's folder or name, or a model as a recipe's --model takes it."""
    max_tokens: int = 512
    """The longest answer, in tokens."""
    temperature: float = 0.7
    """0 for the most probable answer."""
    system: str | None = None
    """A system message, if the model's chat template knows them."""

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be sampled."""
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature)

    def run(self) -> int:
        """Answers line by line."""
        with CapturedOutput() as output, tempfile.TemporaryDirectory(prefix="ownloop-chat-") as scratch:
            finish(self._chat(Path(scratch), output), output)
        return 0

    async def _chat(self, scratch: Path, output: CapturedOutput) -> None:
        from controller.launching.launcher import Launcher
        from controller.runs.models import resolve_model
        from rl.rollouts.rendering import Renderer

        adapted = adapter_of(self, self.model)
        name = adapted[0].model if adapted else await model_of(self, self.model, scratch, output.say)
        model = resolve_model(name, output.say)
        config = override(_generator_config(model), self.fields, "ownloop chat")
        renderer = Renderer(model, config.max_model_len)
        output.say("starting the generator")
        async with Launcher(scratch / "logs") as launcher:
            generator = await started(launcher, model, config, adapted)
            output.say("an empty line begins a new conversation, Ctrl-D ends")
            await converse(generator, renderer, self, output.say, output.terminal)


def _generator_config(model: Path) -> "GeneratorConfig":
    """One conversation at a time, in the dtype that suits the hardware."""
    from controller.processes.place import gpus_here
    from generator.config import GeneratorConfig
    from rl.system.hardware import cpu_dtype
    from rl.system.hf_config import inspect_model

    context = min(inspect_model(model).max_context, _MAX_CONTEXT)
    return GeneratorConfig(dtype="bfloat16" if gpus_here() else cpu_dtype(), max_model_len=context, max_num_seqs=1)


async def converse(
    generator: "Generator", renderer: "Renderer", options: Chat, say: Callable[[str], None], terminal: TextIO
) -> None:
    """Answers every line of the standard input until its end.

    A model without a chat template continues each line as it stands. An empty line begins a new conversation, and so
    does a conversation that no longer fits into the context.
    """
    system = [{"role": "system", "content": options.system}] if options.system else []
    chat = list(system)
    if not renderer.has_chat_template:
        say("the model has no chat template: it continues each line as it stands")
    lines = _lines()
    while (line := await lines.get()) is not None:
        if not line.strip():
            chat = list(system)
            continue
        chat.append({"role": "user", "content": line})
        tokens = renderer.encode(chat if renderer.has_chat_template else line)
        room = (renderer.max_model_len or _MAX_CONTEXT) - len(tokens)
        if room < 1:
            say("the conversation is longer than the context; a new one begins")
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


@dataclass(frozen=True, kw_only=True)
class Eval(OfCheckpoint, TakesFields):
    """Measures a run's model, or any model, on a recipe's held-out problems."""

    model: Annotated[str, Positional, arg(metavar="RUN|MODEL")]
    """A run's folder or name, or a model as a recipe's --model takes it."""
    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """Says what is asked, and how; --field value as in `ownloop run`."""

    def run(self) -> int:
        """Prints samples, and each held-out measure with its interval; with several held-out sets, as one table."""
        from controller.runs.console import Console

        with CapturedOutput() as output:
            config = runnable_configuration(self.recipe, self.fields, "eval")
            if missing := [name for name in _NEEDED if not hasattr(config, name)]:
                raise ValueError(f"{self.recipe} has no {missing[0]}: its loop samples nothing to reward")
            console = Console(output.terminal)
            try:
                with tempfile.TemporaryDirectory(prefix="ownloop-eval-") as scratch:
                    evaluation = finish(self._evaluation(config, console, Path(scratch)), output)
            finally:
                console.close()
            console.samples(evaluation.groups[:3])
            if evaluation.others:
                console.note(_table(evaluation))
            else:
                console.evaluation(f"of {self.model}", evaluation)
        return 0

    async def _evaluation(self, config: Any, console: "Console", scratch: Path) -> "Evaluation":
        """Starts the recipe's generator on the model, and a trainer to export a checkpoint, or to push an adapter."""
        from controller.launching.hosts import kept
        from controller.launching.launcher import Launcher
        from controller.runs.rollout_source import RolloutSource
        from rl.system.timeline import show_progress_with

        show_progress_with(console.progress)
        hosts = options_of(config).hosts
        async with kept(hosts, console.phase):
            # Hosts keep the copy that they get of a model, so they find it in its place the next time.
            adapted = adapter_of(self, self.model)
            if adapted is not None:
                model = adapted[0].model
            else:
                model = await model_of(self, self.model, scratch, console.phase, keep=hosts is not None)
            run = run_of(self.model, self.runs)
            source = RolloutSource(replace(config, model=model), console.phase, began_at(run) if run else None)
            console.phase("starting the generator")
            async with Launcher(scratch / "logs", hosts) as launcher:
                return await source.evaluate(await started(launcher, source.model, config.generator_config, adapted))


def _table(evaluation: "Evaluation") -> str:
    """A row for each held-out set and a column for each measure with its 95 % interval, as Markdown."""
    sets = {prefix.removesuffix("_") or "(recipe)": part for prefix, part in evaluation.sets.items()}
    names = [*dict.fromkeys(name for part in sets.values() for name in part.intervals)]
    rows = [["set", "problems", "answers", *names], ["---"] * (3 + len(names))]
    for name, part in sets.items():
        cells = [part.intervals.get(measure) for measure in names]
        shown = ["" if cell is None else f"{cell.mean:.3f} [{cell.low:.3f}, {cell.high:.3f}]" for cell in cells]
        rows.append([name, str(len(part.groups)), str(part.num_samples), *shown])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def adapter_of(options: OfCheckpoint, name: str) -> tuple[Any, Path] | None:
    """Configuration and checkpoint of a run that trained an adapter; None for all else, and without a checkpoint."""
    from controller.commands.resume import resumed_configuration
    from controller.runs.checkpoints import checkpoint_of

    run = run_of(name, options.runs)
    if run is None or not complete_checkpoints(run / "checkpoints"):
        return None
    config = resumed_configuration(run, [])
    return None if options_of(config).lora is None else (config, checkpoint_of(run, options.step))


async def started(
    launcher: "Launcher", model: Path, config: "GeneratorConfig", adapted: tuple[Any, Path] | None
) -> "Generator":
    """A generator of a model; for an adapter, of the base and the exact adapter: a merge in bfloat16 would round it."""
    from controller.runs.checkpoints import POLICY
    from generator.config import LoRALimits

    if adapted is None:
        return await launcher.generator(model, replace(config, lora=None))
    run, checkpoint = adapted
    vision = run.trainer.train_vision
    config = replace(config, lora=LoRALimits(max_rank=run.lora.rank, max_adapters=1, vision=vision))
    of_trainer = replace(run.policy_config, placement=config.placement)
    trainer, generator = await asyncio.gather(
        launcher.trainer(model, of_trainer, generator=config), launcher.generator(model, config)
    )
    await trainer.load_checkpoint(checkpoint / POLICY)
    await generator.pull_model_state_dict(await trainer.push_model_state_dict())
    return generator


async def model_of(
    options: OfCheckpoint, name: str, scratch: Path, say: Callable[[str], None], *, keep: bool = False
) -> str:
    """What `resolve_model` takes for RUN|MODEL: the model's own name or, of a run, a directory.

    That is the checkpoint of `options.step`, exported to `scratch` unless `ownloop export` has done it; without a step
    the run's trained model or, if it has none yet or was continued after its end, its newest checkpoint. With `keep` it
    is exported to where `ownloop export` would. Raises ValueError for a step of a model, and for a run without that
    checkpoint.
    """
    from controller.commands.resume import resumed_configuration
    from controller.runs.checkpoints import checkpoint_of, export_checkpoint
    from controller.runs.folder import FINISHED, state_of

    run = run_of(name, options.runs)
    if run is None:
        if options.step is not None:
            raise ValueError(f"--step is {options.step}, but {name} is no run; a model has no steps")
        return name
    # The model of a run that was resumed after its end, and stopped, is that of its first part.
    is_final = state_of(run) == FINISHED or not complete_checkpoints(run / "checkpoints")
    if options.step is None and is_final and (run / "model" / "config.json").is_file():
        return str(run / "model")
    checkpoint = checkpoint_of(run, options.step)
    exported = run / "exports" / checkpoint.name
    if not (exported / "config.json").is_file():
        exported = exported if keep else scratch / "model"
        config = resumed_configuration(run, [])
        say(f"loading {checkpoint}")
        await export_checkpoint(config, checkpoint, exported, scratch / "logs", say)
    return str(exported)
