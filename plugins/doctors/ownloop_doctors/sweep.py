"""`ownloop sweep RECIPE --seed 0 1 2 --learning-rate 1e-5 2e-5`: a run for every combination, one after the other.

Each is an `ownloop run` with a folder of its own within the sweep's. Started again, the sweep continues: finished runs
stay, a run that was stopped is resumed, and the others follow.
"""

import itertools
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, arg

from controller.commands.command import OfRuns, TakesFields, folder_named
from controller.commands.command_line import FAILED, HELP
from controller.commands.recipes import configuration, find_recipe, load_recipe, runnable_configuration
from controller.commands.saved_recipe import RECIPE_FILE, saved_recipe
from controller.commands.show import print_runs
from controller.launching.hosts import Hosts
from controller.runs import GroupLoopConfig
from controller.runs.folder import FINISHED, check_ended, complete_checkpoints, state_of

_STOPPED = 128  # statuses above this are signals


@dataclass(frozen=True, kw_only=True)
class Sweep(OfRuns, TakesFields):
    """Runs a recipe once for every combination of values, one after the other.

    For example: `ownloop sweep RECIPE --seed 0 1 2 --learning-rate 1e-5 2e-5`.
    Quote each value of an option that takes several words: `--loss-config "beta 1" "beta 2"`.
    """

    recipe: Annotated[str, Positional, arg(metavar="RECIPE")]
    """Fields follow it, with one or several values each."""
    name: str | None = None
    """The sweep's folder within --runs, by default RECIPE-sweep."""

    def run(self) -> int:
        """Runs what is left to run and prints a table. Returns 1 if a run failed; after a signal, the run's status."""
        if HELP & set(self.fields):
            configuration(self.recipe, ["--help"], "sweep")
        config = load_recipe(find_recipe(self.recipe))
        combinations = combinations_of(self.fields, lambda option: takes_several_words(config, option))
        for combination in combinations.values():
            runnable_configuration(self.recipe, combination, "sweep")  # a wrong value is refused before any run starts
        folder = folder_named(self.runs, f"{Path(self.recipe).stem}-sweep" if self.name is None else self.name)
        for name, combination in combinations.items():
            check_ended(folder / name)  # another sweep may share this one's folder
            _check_options(folder / name, combination)
        failed = False
        for number, (name, combination) in enumerate(combinations.items(), start=1):
            run = folder / name
            if run.is_dir() and state_of(run) == FINISHED:
                continue
            print(f"run {number} of {len(combinations)}: {name}", flush=True)
            status = _run(self.recipe, folder, name, combination)
            if status < 0 or status > _STOPPED:
                return status if status > 0 else _STOPPED - status
            failed = failed or status != 0
        _print_table(folder, list(combinations))
        return FAILED if failed else 0


def combinations_of(
    overrides: Sequence[str], takes_several: Callable[[str], bool] | None = None
) -> dict[str, list[str]]:
    """Name of a run -> its options, for every combination of the values that the options have.

    All words of an option that `takes_several` are one value, unless each is quoted: "beta 1" "beta 2" are two values
    of two words. By default the fields of `GroupLoopConfig` say which do. Raises ValueError if there is only one
    combination.
    """
    takes_several = takes_several or (lambda option: takes_several_words(GroupLoopConfig, option))
    values = _by_option(overrides)
    swept: dict[str, list[str]] = {}
    for option, given in values.items():
        quoted = all(" " in word for word in given)
        if len(given) > 1 and (quoted or not takes_several(option)):
            swept[option] = given
        if quoted and takes_several(option):
            values[option] = [part for word in given for part in shlex.split(word)]
    if not swept:
        raise ValueError(
            "a sweep needs an option with several values: --seed 0 1 2; for one run there is `ownloop run`"
        )
    found: dict[str, list[str]] = {}
    for chosen in itertools.product(*swept.values()):
        words = [
            shlex.split(value) if takes_several(option) else [value]
            for option, value in zip(swept, chosen, strict=True)
        ]
        one = {**values, **dict(zip(swept, words, strict=True))}
        name = ",".join(f"{option.removeprefix('--')}={value}" for option, value in zip(swept, chosen, strict=True))
        name = re.sub(r"[^\w.,=+-]", "_", name)
        if name in found:
            raise ValueError(f"two runs of the sweep would have the name {name}; run one of the two values by itself")
        found[name] = [word for option, given in one.items() for word in (option, *given)]
    return found


def takes_several_words(config: object, option: str) -> bool:
    """Whether a configuration's field, or that of a dataclass, takes several words: a mapping or a sequence."""
    *path, name = option.removeprefix("--").replace("-", "_").split(".")
    for each in path:
        config = getattr(config, each, None)
    hints = get_type_hints(config if isinstance(config, type) else type(config))
    return name in hints and _is_collection(hints[name])


def _is_collection(hint: object) -> bool:
    """Whether a type, or one in a union, is of a mapping or a sequence other than text. Hosts are a list of them."""
    kind = get_origin(hint) or hint
    several = isinstance(kind, type) and issubclass(kind, Mapping | Sequence | Set) and not issubclass(kind, str)
    return (
        several or kind is Hosts or (kind in (Union, UnionType, Annotated) and any(map(_is_collection, get_args(hint))))
    )


def _by_option(words: Sequence[str]) -> dict[str, list[str]]:
    """Option -> its values."""
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            values.setdefault(option, []).extend([value] if equals else [])
        elif not values:
            raise ValueError(f"unexpected argument {word}; a sweep takes options: --seed 0 1 2")
        else:
            values[next(reversed(values))].append(word)
    return values


def _check_options(run: Path, combination: Sequence[str]) -> None:
    """Raises ValueError if a run that would be taken as it is, or resumed, was started with other options."""
    stays = (run / RECIPE_FILE).is_file() and (complete_checkpoints(run / "checkpoints") or state_of(run) == FINISHED)
    if stays and _by_option(before := saved_recipe(run)["options"][0]) != _by_option(combination):
        raise ValueError(
            f"{run} was started with {' '.join(before)}, and this sweep has {' '.join(combination)}; choose another "
            "--name"
        )


def _run(recipe: str, folder: Path, name: str, combination: Sequence[str]) -> int:
    """Starts or continues a run, and waits for its end. Returns its exit status, negative after a signal."""
    run = folder / name
    if complete_checkpoints(run / "checkpoints"):
        arguments = ["--resume", str(run)]
    else:
        _set_aside(run)
        arguments = [recipe, *combination, "--runs", str(folder), "--name", name]
    process = subprocess.Popen([sys.executable, "-m", "controller.commands.cli", "run", *arguments])
    for number in (signal.SIGTERM, signal.SIGHUP):  # a job manager sends them to the sweep alone
        signal.signal(number, lambda received, _: process.send_signal(received))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has told the run too, which saves its last step and ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _print_table(folder: Path, names: Sequence[str]) -> None:
    print()
    print_runs([folder / name for name in names if (folder / name).is_dir()])


def _set_aside(run: Path) -> None:
    """Renames the folder of a run that cannot be resumed, so that its name is free. Does nothing if there is none.

    Raises ValueError if the run has not ended.
    """
    check_ended(run)
    if run.is_dir():
        number = next(n for n in range(1, 1000) if not run.with_name(f"{run.name}.stopped-{n}").exists())
        run.rename(run.with_name(f"{run.name}.stopped-{number}"))
