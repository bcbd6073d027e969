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
import os
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro
from tyro.conf import AvoidSubcommands, DisallowNone, FlagCreatePairsOff, Positional, Suppress

from controller.commands.command_line import HELP, CommandEndedError
from rl.checks import did_you_mean

if TYPE_CHECKING:
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
    flags = {
        f"--{name.replace('_', '-')}": hint is bool
        for name, hint in hints.items()
        if Positional not in getattr(hint, "__metadata__", ())
    }
    # After a recipe, --help lists the recipe's fields.
    if HELP & {*words[:1]} or (HELP & set(words) and not (takes_fields and "recipe" in hints)):
        own, fields = ["--help"], list[str]()
    elif takes_fields:
        own, fields = _divided(words, flags)
    else:
        own, fields = gathered(words, "--hosts"), list[str]()
        check_options(own, flags)
    for word in own:
        if flags.get(_name(word)) and "=" in word:
            raise ValueError(f"{_name(word)} takes no value")
    try:
        command = from_words(kind, own, program, markers=(FlagCreatePairsOff, DisallowNone))
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


def check_options(words: Sequence[str], known: Iterable[str]) -> None:
    """Raises ValueError for an option that is not known, naming the nearest."""
    known = list(known)
    for word in words:
        if word.startswith("--") and _name(word) not in known:
            raise ValueError(f"unknown option {_name(word)}{did_you_mean(_name(word), known, 'see --help')}")


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
    kind: type[Any],
    words: Sequence[str],
    program: str,
    *,
    markers: Sequence[Any] = (),
    default: Any = tyro.MISSING_NONPROP,
    description: str | None = None,
    registry: "ConstructorRegistry | None" = None,
) -> Any:
    """A dataclass from words, by tyro.

    Raises ValueError, in one line, for what tyro or the dataclass refuses, and CommandEndedError with the help.
    """
    output, errors = io.StringIO(), io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            _width(unlimited=not HELP & set(words)),
        ):
            return tyro.cli(
                kind,
                args=list(words),
                default=default,
                prog=program,
                description=description,
                registry=registry,
                config=(AvoidSubcommands, *markers),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise CommandEndedError(0, output.getvalue().replace("\n\n\n", "\n\n")) from None
        raise ValueError(_first_message(errors.getvalue() + output.getvalue())) from None


@contextlib.contextmanager
def _width(*, unlimited: bool) -> Generator[None]:
    """While the block lasts, tyro does not fold its messages at the terminal's width: it would cut paths in two."""
    before = os.environ.get("COLUMNS")
    if unlimited:
        os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


_WORDS = (
    (r"Error parsing (--[\w.-]+): invalid literal for int\(\).*?: (.*)", r"\1 is \2; it must be a whole number"),
    (r"Error parsing (--[\w.-]+): could not convert string to float: (.*)", r"\1 is \2; it must be a number"),
    (
        r"Error parsing (--[\w.-]+): no type matching .*\bINT\b.* from \[(.*)\]\.",
        r"\1 is \2; it must be a whole number",
    ),
    (r"Error parsing (--[\w.-]+): no type matching .*\bFLOAT\b.* from \[(.*)\]\.", r"\1 is \2; it must be a number"),
    (
        r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*?),?\)\.",
        r"\2 is \1, which is not known; known: \3",
    ),
    (r"Missing value for argument '(.*)'\..*", r"\1 needs a value"),
    (r"Missing from (.*?): (\S+) .*\(required\).*", r"\2 is missing; see \1 --help"),
    (r"Error parsing (--[\w.-]+): Failed to parse key-value pairs!.*", r"\1 takes pairs of a name and its value"),
    (r"Unrecognized options: (--[\w.-]+).*", r"\1 is no option itself; see \1.FIELD in --help, or set it in a recipe"),
    (
        r"Unrecognized options: ((?i:true|false))\b.*",
        r"unexpected argument \1; --FIELD alone is True, --no-FIELD or --PART.no-FIELD False",
    ),
    (r"Unrecognized options: ([^,]*).*", r"unexpected argument \1"),
    (r"Error parsing (?:--hosts|[\w.]+): (.*)", r"\1"),  # a dataclass's own message names the field already
)
"""What tyro says, as a pattern, and what the user reads. Anything else is passed on as it is."""


def _first_message(text: str) -> str:
    """The text between the title and the first rule of the box that tyro draws, as one line in our words."""
    lines: list[str] = []
    for line in text.splitlines()[1:]:
        content = line.strip("│╰╯ ")
        if set(content) <= {"─", "-"}:
            if lines:
                break
        else:
            lines.append(content)
    message = " ".join(lines) or text.strip()
    matches = ((re.fullmatch(pattern, message), words) for pattern, words in _WORDS)
    return next((match.expand(words) for match, words in matches if match), message)
