"""Rows of JSON lines, of any framework, as problems whose reward is a function of the answer and of a row's columns."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.data.rows import content_id
from rl.envs.jsonl import JsonlProblem


def parse_columns(named: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """What is needed -> the column that has it, from texts such as "prompt=input"; and the names for what was answered.

    A name for the answer itself is given as "solution_str=completion". Raises ValueError for another text.
    """
    columns = {name: column for name, _, column in (each.partition("=") for each in named)}
    if wrong := [name for name, column in columns.items() if not (name and column)]:
        raise ValueError(f"--columns has {wrong[0]!r}; it must be like completion=output")
    said = tuple(name for name, column in columns.items() if column == "completion")
    return {name: column for name, column in columns.items() if name not in said}, ("completion", *said)


def read_columns(file: Path, columns: Mapping[str, str], needed: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file with one JSON object per line, each with the columns `needed`.

    Raises ValueError, naming file and line, for a row that is no object or lacks a column.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}; it should hold one JSON object per line with {', '.join(needed)}")
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    rows = [_row(text, f"{file}:{n}", columns, needed) for n, text in enumerate(lines, start=1) if text.strip()]
    if not rows:
        raise ValueError(f"{file} holds no line; it should hold one JSON object per line with {', '.join(needed)}")
    return rows


def _row(text: str, where: str, columns: Mapping[str, str], needed: Sequence[str]) -> dict[str, Any]:
    try:
        row: object = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object")
    if missing := [column for column in columns.values() if column not in row]:
        raise ValueError(f"{where} has no column {missing[0]!r}; it has {', '.join(map(str, row))}")
    row |= {name: row[column] for name, column in columns.items()}
    if missing := [name for name in needed if name not in row]:
        raise ValueError(f"{where} has no column {missing[0]!r}; --columns {missing[0]}=NAME says which it is")
    return row


def problems_of_rows(
    rows: Sequence[Mapping[str, Any]], function: Callable[..., object], said: Sequence[str] = ("completion",)
) -> list[JsonlProblem]:
    """A problem for each row. `function` is called with the answer as `said`, and with the columns of its parameters.

    Raises ValueError for a parameter without a column.
    """
    parameters = inspect.signature(function).parameters.values()
    takes = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = {each.name for each in takes}
    for each in takes:
        if each.default is each.empty and each.name not in said and any(each.name not in row for row in rows):
            raise ValueError(f"the reward has a parameter {each.name!r}, which not every row has; see --columns")
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def score(prompt: object, completion: str, **row: object) -> Any:
        given = {"prompt": prompt, **row, **dict.fromkeys(said, completion)}
        return function(**{name: value for name, value in given.items() if takes_all or name in names})

    return [
        JsonlProblem(
            id=content_id([n, row["prompt"]]),
            prompt=row["prompt"],
            score=score,
            row={name: value for name, value in row.items() if name not in ("prompt", *said)},
        )
        for n, row in enumerate(rows)
    ]
