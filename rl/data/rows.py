"""Reads JSONL files and checks their rows. A "fault" is a phrase that says what is wrong with a value, or ""."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

Fault = Callable[[Any], str]


def no_fault(_value: Any) -> str:
    """Accepts every value."""
    return ""


def text_fault(value: Any) -> str:
    """What keeps a value from being a non-empty text."""
    if not isinstance(value, str):
        return f"is a {type(value).__name__}; text is needed"
    return "" if value else "is empty; text is needed"


def surrogate_fault(value: Any) -> str:
    """What keeps the texts anywhere in a JSON value from being encoded, as for a tokenizer: half of a UTF-16 pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = error.object
        return f"holds the lone surrogate {text[error.start]!a} in {text[max(error.start - 40, 0) : error.start]!a}"
    return ""


def prompt_fault(value: Any) -> str:
    """What keeps a value from being a prompt (`rl.protocols.Prompt`)."""
    if isinstance(value, str):
        return text_fault(value)
    if not isinstance(value, list | tuple) or not value:
        return f"is {value!r:.80}; text, or messages with 'role' and 'content', are needed"
    for message in cast("list[Any]", value):
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            return f"holds {message!r:.80}; each message needs 'role' and 'content', both text"
    return ""


def read_rows(path: Path, fields: Mapping[str, Fault], row_fault: Fault = no_fault) -> list[dict[str, Any]]:
    """The JSON objects of a file with one per line. Empty lines are skipped.

    `fields` are the names that every row must have, each with a check of its value. `row_fault` checks a whole row.
    Raises ValueError for a file that cannot be read or has no row, and for the first bad line, naming file and line.
    """
    needed = ", ".join(map(repr, fields))
    if not path.is_file():
        raise ValueError(f"there is no file {path}; it should hold one JSON object per line with {needed}")
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(row := parse_row(line, f"{path}:{number}", fields))
                    if fault := row_fault(row):
                        raise ValueError(f"{path}:{number}: {fault}")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no line; it should hold one JSON object per line with {needed}")
    return rows


def parse_row(line: str, where: str, fields: Mapping[str, Fault]) -> dict[str, Any]:
    """One line's JSON object with its fields checked. Raises ValueError that begins with `where`."""
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        needed = ", ".join(map(repr, fields))
        raise ValueError(f"{where} is a {type(row).__name__}; a JSON object with {needed} is needed")
    checked = cast("dict[str, Any]", row)
    if fault := surrogate_fault(checked):
        raise ValueError(f"{where} {fault}")
    for name, fault_of in fields.items():
        if name not in checked:
            raise ValueError(f"{where} lacks {name!r}; it has {', '.join(map(repr, checked)) or 'no field'}")
        if fault := fault_of(checked[name]):
            raise ValueError(f"{where}: {name!r} {fault}")
    return checked
