"""Checks a page's commands without running them: programs, targets, recipes, options and files must exist."""

import functools
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from controller.commands.command_line import COMMANDS, HELP, parse_command
from controller.commands.recipes import configuration, recipe_files
from controller.commands.run import Run
from controller.commands.show import Show
from rl.system.plugins import named_by
from tests.docs.pages import PLUGINS, ROOT

_OTHER_PROGRAMS = {"kubectl", "sbatch", "git", "cd", "cp", "tail", "mkdir", "pre-commit", "source"} | {
    *("pip", "uv", "python3.11", "docker"),
}
"""Programs whose arguments are not checked."""
RUN = "runs/my-run"
"""The run that pages name."""


def commands_of(text: str) -> list[list[str]]:
    """The words of each command of a bash block, without comments, variables in front and a file for the output."""
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [_without_variables(words[: (*words, ">").index(">")]) for words in commands if words]


def is_cheap(words: Sequence[str]) -> bool:
    """Whether a command only prints something, and reads no run."""
    program, *arguments = words
    shows = arguments[:1] == ["check-env"] or (arguments[0] in ("list", "show") and not _names_a_run(arguments))
    prints = shows or bool({"--help", "--version"} & {*arguments})
    return program.endswith("ownloop") and prints and not needs_more(arguments)


def reads_a_run(words: Sequence[str]) -> bool:
    """Whether a command only looks at the run `runs/my-run`, or at all runs."""
    program, *arguments = words
    reads = arguments[:1] == ["runs"] or (arguments[0] in ("show", "report") and arguments[1:] == [RUN])
    reads = reads and not needs_more(arguments)
    return reads if program.endswith("ownloop") else program.endswith("python") and arguments[1:2] == [RUN]


def _names_a_run(arguments: Sequence[str]) -> bool:
    return any(word.startswith("runs/") for word in arguments)


def check_command(words: Sequence[str]) -> None:
    """Raises AssertionError, or the error of `ownloop` itself, for a command that would be refused."""
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    checks: dict[str, Callable[[Sequence[str]], None]] = {
        "make": _check_make,
        "ownloop": _check_ownloop,
        "python": _check_python,
        ".ci/run": lambda _: None,
    }
    assert program in {*checks, *_OTHER_PROGRAMS}, f"{program} is no program that a page may use"
    if program in checks:
        checks[program](arguments)


def _check_make(arguments: Sequence[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    variables = dict(word.split("=", 1) for word in arguments if "=" in word)
    named = [word for word in arguments if "=" not in word]
    assert set(named) <= set(targets), f"the Makefile has no target {set(named) - set(targets)}"
    if named == ["train"] and "ARGS" in variables:
        _check_ownloop(["run", variables.get("RECIPE", "grpo_smollm2_cpu"), *shlex.split(variables["ARGS"])])


def _check_ownloop(arguments: Sequence[str]) -> None:
    if arguments == ["--version"] or needs_more(arguments):
        return
    command = parse_command([word for word in arguments if word not in HELP])
    module: Any = importlib.import_module(type(command).__module__)
    if isinstance(command, Show) and _names_a_run([command.recipe]):
        assert not command.fields, f"unexpected {command.fields}"
    elif arguments[0] == "sweep" and not HELP & {*arguments}:
        for combination in module.combinations_of(command.fields).values():
            configuration(command.recipe, combination, "sweep")
    elif arguments[0] == "serve":
        module.configuration(command.fields)
    elif recipe := getattr(command, "recipe", None):
        configuration(recipe, command.fields, arguments[0])
    else:  # a resumed run has its recipe in its folder
        continues = isinstance(command, Run) and (command.resume or command.fork)
        assert continues or not getattr(command, "fields", ()), f"unexpected {command.fields}"


def needs_more(arguments: Sequence[str]) -> bool:
    """Whether a command of `ownloop` is of a plug-in that is not installed here, or names such a plug-in's recipe."""
    commands, recipes = _not_installed()
    return arguments[0] in commands or bool({*arguments} & recipes)


@functools.cache
def _not_installed() -> tuple[set[str], set[str]]:
    """The commands and the recipes of plug-ins that are not installed here."""
    commands = {name for plugin in PLUGINS for name in _entry_points(plugin, "commands")}
    recipes = {file.stem for plugin in PLUGINS for file in plugin.glob("configs/*.py")}
    return commands - {*COMMANDS, *named_by("commands")}, recipes - {*recipe_files()}


def _entry_points(plugin: Path, group: str) -> dict[str, str]:
    """Those that a plug-in's pyproject.toml declares."""
    project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
    return project.get("entry-points", {}).get(f"ownloop.{group}", {})


def _check_python(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"there is no module {arguments[1]}"
    else:
        assert (ROOT / arguments[0]).is_file() or Path(arguments[0]).is_file(), f"there is no file {arguments[0]}"


def _without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words
