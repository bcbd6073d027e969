"""`ownloop run RECIPE --replay RUN`: a loop trains on the recorded rollouts of another run, without a generator."""

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from controller.handles.offline import OfflineGeneratorConfig
from controller.runs.models import resolve_model
from generator.config import GeneratorConfig
from rl.protocols import best_reward_of
from rl.rollouts.recorded import RecordedEnv
from rl.rollouts.tokenizer import load_tokenizer, text_of
from rl.runs.folder import EARLIER_ROLLOUTS, ROLLOUTS
from rl.runs.recording import recorded_files
from rl.types import Group

_NUM_CHECKED = 64  # completions that are decoded to check the tokenizer
_MAX_DIFFERENT = 0.1  # of them: decoders disagree on characters that were cut in two, for example
_NEEDED = ("model", "env", "generator", "prompts_per_step", "num_steps")


def recording_file(run: Path) -> Path:
    """The rollouts in a run's folder. Any other path is taken for a recording itself."""
    if not run.is_dir() or recorded_files(run):
        return run
    earlier = run / EARLIER_ROLLOUTS
    return earlier if earlier.is_file() else run / ROLLOUTS


def replayed(config: Any, file: Path) -> Any:
    """The configuration with the environment and the generator replaced by a recording.

    Raises ValueError for a loop that samples no rollouts or several batches a step, for more steps than were recorded,
    for a file that is not a recording, and for a recording of another tokenizer.
    """
    missing = [name for name in _NEEDED if not hasattr(config, name)]
    if missing:
        raise ValueError(f"--replay is for loops that sample rollouts; {type(config).__name__} has no {missing[0]}")
    if hasattr(config, "tokens_per_step"):
        raise ValueError(
            f"--replay is for loops with one rollout batch a step; {type(config).__name__} gathers several"
        )
    env = RecordedEnv(file.absolute(), config.prompts_per_step, best_reward_of(config.env))
    if config.num_steps > env.num_steps:
        raise ValueError(f"num_steps is {config.num_steps}; the recording {file} has {env.num_steps} steps")
    _check_tokenizer(file, env.groups(), resolve_model(config.model))
    options = {field.name: getattr(config.generator, field.name) for field in fields(GeneratorConfig)}
    return replace(config, env=env, generator=OfflineGeneratorConfig(**options))


def _check_tokenizer(file: Path, groups: Iterable[Group], model: Path) -> None:
    """Raises ValueError unless the model's tokenizer decodes the recorded tokens to the recorded text."""
    tokenizer = load_tokenizer(model)
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    completions = list(islice((turn.completion for turn in turns if turn.completion.text.strip()), _NUM_CHECKED))
    different: list[tuple[str, str]] = []
    for completion in completions:
        here = text_of(tokenizer, completion.tokens)
        # The recorded text lacks a stop string, and decoders differ in leading blanks.
        if not _without_blanks(here).startswith(_without_blanks(completion.text)):
            different.append((completion.text, here))
    if len(different) > _MAX_DIFFERENT * len(completions):
        there, here = different[0]
        raise ValueError(
            f"the recording {file} is of another tokenizer than that of {model}: what was {there[:40]!r} is "
            f"{here[:40]!r} to it"
        )


def _without_blanks(text: str) -> str:
    return "".join(text.split())
