"""What commands share: their common arguments, and how words become a command, by tyro and with errors in our words.

    @dataclass(frozen=True, kw_only=True)
    class Greet(OfRuns):
        '''Greets a user.'''  # `ownloop --help` shows the first line

        name: Annotated[str, Positional, arg(metavar="NAME")]
        '''The user.'''
        loudly: bool = False
        '''Use capital letters.'''

        def run(self) -> int: ...  # the exit status; a ValueError is the caller's mistake

A command that is derived from `TakesFields` leaves options that it does not have to a recipe:

    run grpo_smollm2_cpu --name a --num-steps 3   ->   Run(recipe=..., name="a", fields=("--num-steps", "3"))
"""

import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import tyro
from tyro._errors import (
    BadValue,
    InstantiationFailure,
    InvalidChoice,
    MissingArgs,
    ParseErrorEvent,
    UnrecognizedArgs,
    on_parse_error,
)
from tyro.conf import AvoidSubcommands, DisallowNone, FlagCreatePairsOff, Positional, Suppress

from controller.commands.command_line import HELP, CommandEndedError
from rl.checks import did_you_mean, unknown_name

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition
    from tyro.constructors import ConstructorRegistry


@dataclass(frozen=True, kw_only=True)
class TakesFields:
    """A command with options that are fields of a configuration."""

    fields: Annotated[tuple[str, ...], Suppress] = ()


@dataclass(frozen=True, kw_only=True)
class OfRuns:
    """A command that names runs, or makes some."""

    runs: Path = Path("runs")
    """Where runs are kept."""


@dataclass(frozen=True, kw_only=True)
class OfCheckpoint(OfRuns):
    """A command that loads a checkpoint of a run."""

    step: int | None = None
    """The checkpoint's step. The default is the newest."""


def folder_named(runs: Path, name: str) -> Path:
    """The folder of a new run within `runs`. Raises ValueError for a name that is not the name of a folder in it."""
    if name in ("", ".", "..") or name != Path(name).name or name.startswith("-") or not name.isprintable():
        raise ValueError(f"--name is {name!r}; it must be the name of a folder, without '/'; --runs says where it goes")
    return runs / name


def parse(kind: type[Any], words: Sequence[str], program: str) -> Any:
    """The command of this class with the arguments that `words` give.

    Raises ValueError for a mistake, and CommandEndedError with the help.
    """
    hints = get_type_hints(kind, include_extras=True)
    takes_fields = hints.pop("fields", None) is not None
    if takes_fields and not hints:
        return kind(fields=tuple(words))
    own = [f"--{name.replace('_', '-')}" for name in hints if Positional not in get_args(hints[name])]
    # After a recipe, --help lists the recipe's fields.
    if HELP & {*words[:1]} or (HELP & set(words) and not (takes_fields and "recipe" in hints)):
        mine, fields = ["--help"], list[str]()
    elif takes_fields:
        mine, fields = _divided(words, own)
    else:
        mine, fields = gathered(words, "--hosts"), list[str]()
    try:
        command = from_words(kind, mine, program, options=own, markers=(FlagCreatePairsOff, DisallowNone))
    except ValueError as error:
        if fields and " is missing" in str(error):
            raise ValueError(f"{fields[0]} comes too early, or is not known: see {program} --help") from error
        raise
    return replace(command, fields=tuple(fields)) if takes_fields else command


def _divided(words: Sequence[str], own: Iterable[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and the words from the first option on that is not its own."""
    mine, others = list[str](), list[str]()
    into = mine
    for word in words:
        if word.startswith("--") or word in HELP:
            into = mine if _name(word) in own else others
        into.append(word)
    return mine, others


def gathered(words: Sequence[str], name: str) -> list[str]:
    """`words` with the values of an option that may be given several times at their end: tyro would take the last."""
    others, values, owner, is_named = list[str](), list[str](), "", False
    for word in words:
        if word.startswith("--"):
            owner, _, value = word.partition("=")
            is_named |= owner == name
            values += [value] if owner == name and value else []
        elif owner == name:
            values.append(word)
        if owner != name:
            others.append(word)
    return [*others, name, *values] if is_named else others


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def from_words(
    kind: type[object],
    words: Sequence[str],
    program: str,
    *,
    options: Sequence[str],
    markers: Sequence[object] = (),
    default: object = tyro.MISSING_NONPROP,
    description: str | None = None,
    registry: "ConstructorRegistry | None" = None,
) -> Any:
    """A dataclass from words, by tyro. `options` are those that there are; a mistake's answer names the nearest.

    Raises ValueError, in one line, for what tyro or the dataclass refuses, and CommandEndedError with the help.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), on_parse_error(partial(_refuse, words, options)):
            return tyro.cli(
                kind,
                args=list(words),
                default=default,
                prog=program,
                description=description,
                registry=registry,
                config=(AvoidSubcommands, *markers),
            )
    except SystemExit:
        raise CommandEndedError(0, output.getvalue().replace("\n\n\n", "\n\n")) from None


def _refuse(words: Sequence[str], options: Sequence[str], event: ParseErrorEvent) -> None:
    """Raises ValueError with what tyro refuses, in one line."""
    match event:
        case UnrecognizedArgs(tokens=[word, *_]):
            raise ValueError(_unrecognized(word, words, options))
        case MissingArgs(missing_arguments=[missing, *_]):
            raise ValueError(f"{_name_of(missing.arg)} is missing; see {event.prog} --help")
        case BadValue():
            raise ValueError(f"{_name_of(event.argument)} needs a value, {event.argument.lowered.metavar}")
        case InvalidChoice():
            raise unknown_name(_name_of(event.argument), event.value, event.choices)
        case InstantiationFailure(argument=None):  # a class's own message names the field
            raise ValueError(event.message)
        case InstantiationFailure(argument=argument, message=message) if argument is not None:
            name, reason = _name_of(argument), message.partition("\n")[0]
            takes = "" if name == "--hosts" else f"{name} takes {argument.lowered.metavar}: "  # hosts name themselves
            raise ValueError(f"{takes}{reason}")
        case _:
            return


def _unrecognized(word: str, words: Sequence[str], options: Sequence[str]) -> str:
    """What is wrong with a word that tyro does not know."""
    name = _name(word)
    if name.startswith("--"):
        if name in options or any(option.startswith(f"{name}.") for option in options):
            return f"{name} is no option itself; see {name}.FIELD in --help, or set it in a recipe"
        return f"unknown option {name}{did_you_mean(name, options, 'see --help')}"
    number = next(i for i, each in enumerate(words) if each == word or each.endswith(f"={word}"))
    owner = _name(words[max(number - 1, 0)] if words[number] == word else words[number])
    return f"{owner} takes no value; {word!r} was given" if owner in options else f"unexpected argument {word}"


def _name_of(argument: "ArgumentDefinition") -> str:
    """An argument as the user writes it."""
    if not argument.is_positional():
        return argument.lowered.name_or_flags[0]
    return argument.field.extern_name if argument.lowered.choices else str(argument.lowered.metavar)
