"""Configurations of runs that continue a recorded run: resumed, forked, or trained on its rollouts.

    resume   the saved recipe + its options + new ones  = config.json, except for the steps still to come
    fork     the saved recipe + its options + new ones, in a new folder that begins with a checkpoint of its parent, or
             with the weights of one
    replay   a recipe with the rollouts of another run in place of its environment and its generator

A fork's folder begins with what its parent had recorded up to that step, so its curves are whole. It holds the
checkpoint itself: the trainers' parameters, optimizer state and random state, and the position in the data. Models of
the hub are recorded by commit, so a resumed run has the same files.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from controller.commands.recipes import load_recipe, override
from controller.commands.saved_recipe import PARENT_FILE, RECIPE_FILE, saved_recipe
from controller.handles.offline import OfflineGeneratorConfig
from controller.launching.hosts import Tell
from controller.runs.checkpoints import loop_of
from controller.runs.folder import (
    CONFIG_FILE,
    FIRST_WEIGHTS,
    LOOP_FILE,
    METRICS,
    ROLLOUTS,
    RunFolder,
    began_at,
    check_run_schema,
    complete_checkpoints,
    read_json,
    to_json,
    write_json,
)
from controller.runs.loop_config import ABSENT, differences, options_of
from controller.runs.models import HubName, pinned, resolve_model
from controller.runs.recording import RecordedEnv, recorded_files
from generator.config import GeneratorConfig
from rl.losses import get_loss
from rl.protocols import best_reward_of
from rl.rollouts.tokenizer import load_tokenizer, text_of
from rl.system.disk import RecordingError, write_whole
from rl.types import Group, PathOrName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHANGEABLE = (
    "num_steps",
    "checkpoint_every",
    "keep_checkpoints",
    "max_restarts",
    "restart_window_minutes",
    "log",
    "hosts",
)
"""Fields that may be changed when a run is resumed."""
_MODELS = ("model", "teacher")
"""Fields of a loop's configuration that name models."""
_NUM_CHECKED = 64  # completions that are decoded to check the tokenizer
_MAX_DIFFERENT = 0.1  # of them: decoders disagree on characters that were cut in two, for example
_NEEDED = ("model", "env", "generator", "prompts_per_step", "num_steps")


def resumed_configuration(folder: Path, options: Sequence[str]) -> Any:
    """The configuration of the run in `folder`, with further options. Executes the saved recipe.

    Secrets come from the recipe and may be new ones.

    Raises ValueError for an option that would change steps already done, for a recipe that no longer returns the
    recorded configuration, and for a folder of another schema version.
    """
    name = f"ownloop run --resume {folder}"
    config = _as_begun(folder, name)
    resumed = override(config, options, name)
    if replay := saved_recipe(folder).get("replay"):
        config, resumed = (replayed(made, Path(replay)) for made in (config, resumed))
    recorded = read_json(folder / CONFIG_FILE)
    as_begun, as_resumed = (to_json(made) for made in (config, resumed))
    changed = {
        field: (before, after)
        for field, (before, after) in differences(recorded, as_begun).items()
        if not _may_change(field) and before is not ABSENT  # newer fields have their defaults
    }
    is_older = hasattr(config, "normaliser") and "normaliser" not in recorded
    if is_older and get_loss(config.loss).normaliser != "tokens":
        raise ValueError(
            f"loss {config.loss!r} of {folder} was a mean over tokens, as all losses then, and is none now; "
            f"begin a new run: ownloop run --fork {folder} --normaliser tokens"
        )
    if changed:
        raise ValueError(
            f"the recipe of {folder} now makes another configuration: {_words(changed)}; the code that it imports has "
            "changed since the run began"
        )
    changed = differences(as_begun, as_resumed)
    refused = {field: values for field, values in changed.items() if not _may_change(field)}
    if refused:
        raise ValueError(
            f"a resumed run keeps its configuration except for {', '.join(CHANGEABLE)} and gpus: {_words(refused)}; "
            "start a new run for that"
        )
    _check_num_steps(folder, resumed)
    return resumed


def _as_begun(folder: Path, program: str) -> Any:
    """The configuration that the run in `folder` began with, before a recording took its environment's place."""
    recipe = saved_recipe(folder)
    config = load_recipe(Path(recipe["file"]), recipe["source"])
    for options in recipe["options"]:
        config = override(config, options, program)
    return _with_recorded_models(config, folder)


def inputs_of(config: "DataclassInstance") -> dict[str, str]:
    """A digest of each file, and of each folder of a model or a data set, that a configuration names."""
    named = (path for name in fields(config) if not _may_change(name.name) for path in _paths_of(config, name.name))
    return {name: digest for name in sorted(set(named)) if (digest := _digest(Path(name)))}


def check_inputs(folder: Path, config: "DataclassInstance") -> None:
    """Raises ValueError if a file that the run in `folder` began with has changed: its steps would not fit together."""
    begun, now = saved_recipe(folder).get("inputs", {}), inputs_of(config)
    if changed := [name for name in begun if now.get(name) != begun[name]]:
        raise ValueError(
            f"{', '.join(changed)} changed since the run in {folder} began, or went; put it back, or begin a new run: "
            f"ownloop run --fork {folder}"
        )


def _paths_of(owner: "DataclassInstance", field: str) -> Iterable[str]:
    """The texts in a field that name a path, or may do so."""
    hint = get_type_hints(type(owner), include_extras=True).get(field)
    return _paths(getattr(owner, field), is_path=hint == PathOrName)


def _paths(value: object, *, is_path: bool = False) -> Iterable[str]:
    """The texts in a value that name a path: those of a type that says so, and others that look like one."""
    if isinstance(value, Path):
        return [str(value)]
    if isinstance(value, str):
        names = value.encode(errors="replace").split(b"/")
        may_be = len(value) < 4096 and max(map(len, names)) < 256 and value.isprintable()
        return [value] if may_be and (is_path or "." in value or names[1:]) else []
    if is_dataclass(value) and not isinstance(value, type):
        return [path for field in fields(value) for path in _paths_of(value, field.name)]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [path for each in cast("Iterable[object]", inner) for path in _paths(each)]


def _digest(path: Path) -> str:
    """Of a file, by its size and first 64 MiB, or of the files of a model or a data set; empty for any other path."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.sha256(stream.read(2**26)).hexdigest() + f" {path.stat().st_size}"
    if not path.is_dir() or Path.cwd().is_relative_to(path.absolute()) or not any(map(_is_data, path.iterdir())):
        return ""  # not the working directory, in which runs may lie
    files = sorted(f for f in path.rglob("*") if f.is_file() and "/." not in str(f.relative_to(path.parent)))
    return hashlib.sha256("".join(f"{file.name} {_digest(file)}\n" for file in files).encode()).hexdigest()


def _is_data(file: Path) -> bool:
    return file.suffix in (".parquet", ".jsonl", ".json", ".csv")  # a model has a config.json


def _may_change(field: str) -> bool:
    """Whether a resumed run may have another value: a host may have other GPUs, whichever mesh names them."""
    return field in CHANGEABLE or field.rpartition(".")[2] == "gpus"


def _check_num_steps(folder: Path, config: object) -> None:
    """Raises ValueError if the run has already done more than `num_steps` steps."""
    complete, num_steps = complete_checkpoints(folder / "checkpoints"), options_of(config).num_steps
    done = read_json(complete[-1] / LOOP_FILE)["step"] if complete else 0
    if num_steps is not None and num_steps < done:
        raise ValueError(f"num_steps is {num_steps}; the run has a checkpoint of step {done} already")


def _words(changed: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{field} was {before!r} and is now {after!r}" for field, (before, after) in changed.items())


def forked_configuration(parent: Path, options: Sequence[str], tell: Tell) -> Any:
    """The configuration of the run in `parent`, with these options. Executes its saved recipe.

    Raises ValueError as `override` does.
    """
    name = f"ownloop run --fork {parent}"
    config = with_pinned_models(override(_as_begun(parent, name), options, name), tell)
    replay = saved_recipe(parent).get("replay")
    return replayed(config, Path(replay)) if replay else config


def forked_folder(
    path: Path, config: "DataclassInstance", parent: Path, checkpoint: Path, options: Sequence[str]
) -> RunFolder:
    """A new run's folder at `path` that holds `checkpoint` of the run in `parent`, and what was recorded until then.

    Files that never change are linked where the disk allows it. Raises ValueError if `path` cannot be used, and for a
    `num_steps` that the checkpoint has reached; and `RecordingError`, with no folder left, if it does not fit.
    """
    loop, num_steps = loop_of(checkpoint), options_of(config).num_steps
    if num_steps is not None and num_steps <= loop["step"]:
        raise ValueError(
            f"num_steps is {num_steps}, and the checkpoint is of step {loop['step']}; --num-steps must be more"
        )
    folder = RunFolder(path, config, began=began_at(parent))
    with folder.discarded_on_failure():
        lengths = loop["lengths"]
        with (parent / METRICS).open("rb") as metrics:
            write_whole(folder.metrics_file, metrics.read(lengths.get(METRICS, 0)))
        for kind, step, file in recorded_files(parent / ROLLOUTS):
            if step <= lengths.get(f"{ROLLOUTS}/{kind}", -1):
                _link(file, folder.rollouts / file.name)
        _write_origin(folder.path, config, parent, options, loop["step"])
        # The checkpoint comes last, and under its name only once it is whole.
        partial = folder.checkpoints / f".{checkpoint.name}"
        _link_all(checkpoint, partial)
        partial.rename(folder.checkpoints / checkpoint.name)
    folder.begin_again()
    return folder


def folder_with_weights(
    path: Path, config: "DataclassInstance", parent: Path, checkpoint: Path, options: Sequence[str]
) -> RunFolder:
    """A new run's folder at `path` that begins at step 1 with the weights of a checkpoint of the run in `parent`.

    Raises ValueError if `path` cannot be used; and `RecordingError`, with no folder left, if it does not fit.
    """
    folder = RunFolder(path, config)
    with folder.discarded_on_failure():
        _link_all(checkpoint, folder.path / FIRST_WEIGHTS)
        _write_origin(folder.path, config, parent, options, loop_of(checkpoint)["step"], restore="weights")
    return folder


def _write_origin(
    path: Path, config: "DataclassInstance", parent: Path, options: Sequence[str], step: int, **more: str
) -> None:
    """Writes the recipe of a fork, and where it comes from."""
    recipe = saved_recipe(parent)
    added = {**recipe, "options": [*recipe["options"], *([options] if options else [])], "inputs": inputs_of(config)}
    write_json(path / RECIPE_FILE, added, private=True)
    write_json(path / PARENT_FILE, {"run": parent.absolute(), "step": step, **more})


def _link_all(source: Path, target: Path) -> None:
    for file in filter(Path.is_file, source.rglob("*")):
        _link(file, target / file.relative_to(source))


def _link(source: Path, target: Path) -> None:
    """Makes a second name for a file, or a copy of it on another disk. Raises `RecordingError`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(source)
        except OSError:
            shutil.copy2(source, target)
    except OSError as error:
        raise RecordingError(target, error) from error


def with_pinned_models(config: Any, tell: Tell) -> Any:
    """The configuration with "ORG/NAME[@revision]" as "ORG/NAME@<commit>". Fetches those models.

    Raises ValueError if one cannot be had.
    """
    names = _model_names(config)
    return replace(config, **{field: pinned(name, tell) for field, name in names.items()}) if names else config


def _with_recorded_models(config: Any, folder: Path) -> Any:
    """The configuration with the commits that the run in `folder` recorded, where they are of the same models."""
    recorded = read_json(folder / CONFIG_FILE)
    same: dict[str, str] = {}
    for field, name in _model_names(config).items():
        ours, theirs = HubName.parse(name), HubName.parse(str(recorded.get(field)))
        if ours is not None and theirs is not None and theirs.is_pinned and ours.repository == theirs.repository:
            same[field] = str(theirs)
    return replace(config, **same) if same else config


def _model_names(config: object) -> dict[str, str]:
    named = {each: getattr(config, each) for each in _MODELS if hasattr(config, each)}
    return {each: name for each, name in named.items() if isinstance(name, str)}


def recording_file(run: Path) -> Path:
    """The rollouts in a run's folder. Any other path is taken for a recording itself.

    Raises ValueError for a run of another schema.
    """
    if not run.is_dir() or recorded_files(run):
        return run
    check_run_schema(run)
    return run / ROLLOUTS


def replayed(config: Any, file: Path) -> Any:
    """The configuration with the environment and the generator replaced by a recording.

    Raises ValueError for a loop that samples no rollouts, for more steps than were recorded, for a file that is not a
    recording, and for a recording of another tokenizer.
    """
    missing = [name for name in _NEEDED if not hasattr(config, name)]
    if missing:
        raise ValueError(f"--replay is for loops that sample rollouts; {type(config).__name__} has no {missing[0]}")
    if not options_of(config).replays:
        raise ValueError(f"--replay is for loops that sample rollouts; {type(config).__name__} runs programs instead")
    best, again = best_reward_of(config.env), options_of(config).samples_again
    env = RecordedEnv(file.absolute(), config.prompts_per_step, best, samples_again=again)
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
