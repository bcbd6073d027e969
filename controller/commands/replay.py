"""`ownloop run RECIPE --replay RUN`: a loop's trainer side, fed with what another run recorded; no generator runs."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from controller.meshes.offline import OfflineGeneratorConfig
from controller.runs.models import resolve_model
from generator.config import GeneratorConfig
from rl.rollouts.recorded import RecordedEnv
from rl.types import Group

_NUM_CHECKED = 64  # completions that are decoded to tell whose tokens they are
_MAX_DIFFERENT = 0.1  # of them: characters that were cut in two, and what else decoders disagree on
_NEEDED = ("model", "env", "generator", "prompts_per_step", "num_steps")


def recording_file(run: Path) -> Path:
    """The rollouts of a run's folder; any other path is taken for such a file itself."""
    return run / "rollouts.jsonl" if run.is_dir() else run


def replayed(config: Any, file: Path) -> Any:
    """The configuration with a recording in the place of environment and generator.

    Raises ValueError for a loop that samples nothing, or several batches a step, for more steps than were recorded, and
    for a recording that is none, or of another tokenizer.
    """
    missing = [name for name in _NEEDED if not hasattr(config, name)]
    if missing:
        raise ValueError(f"--replay is for loops that sample rollouts; {type(config).__name__} has no {missing[0]}")
    if hasattr(config, "tokens_per_step"):
        raise ValueError(
            f"--replay is for loops with one rollout batch a step; {type(config).__name__} gathers several"
        )
    env = RecordedEnv(file.absolute(), config.prompts_per_step)
    if config.num_steps > env.num_steps:
        raise ValueError(f"num_steps is {config.num_steps}; the recording {file} has {env.num_steps} steps")
    _check_tokenizer(file, env.groups(), resolve_model(config.model))
    options = {field.name: getattr(config.generator, field.name) for field in fields(GeneratorConfig)}
    return replace(config, env=env, generator=OfflineGeneratorConfig(**options))


def _check_tokenizer(file: Path, groups: Sequence[Group], model: Path) -> None:
    """Raises ValueError unless the model's tokenizer makes of the recorded tokens the text that was recorded."""
    from transformers import AutoTokenizer  # a second of import that `--help` should not pay

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    completions = [turn.completion for turn in turns if turn.completion.text.strip()][:_NUM_CHECKED]
    different: list[tuple[str, str]] = []
    for completion in completions:
        here = str(tokenizer.decode(completion.tokens, skip_special_tokens=True))
        # A stop string is not part of the text; decoders differ in the blanks at the beginning.
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
