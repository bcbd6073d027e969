"""Rows of files of JSON lines, split into training and held-out rows, and streamed.

A "fault" is a phrase that says what is wrong with a value, or "". Item i of a stream is a pure function of (seed, i),
so that a run can be resumed anywhere. Whether an item is held out depends only on its text, so that it is on the same
side in every file, run and process.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from rl.checks import surrogate_fault

Fault = Callable[[Any], str]
Order = Callable[[int, int, int], Sequence[int]]
"""(num_items, seed, epoch) -> a permutation of 0..num_items-1: the order in which this epoch goes through the items."""
EVAL_FRACTION = 0.1
T = TypeVar("T")


def no_fault(_value: object) -> str:
    """Accepts every value."""
    return ""


def read_rows(path: Path, fields: Mapping[str, Fault], row_fault: Fault = no_fault) -> list[dict[str, Any]]:
    """The fields of the JSON objects of a file with one per line. Empty lines are skipped, and all other fields.

    Every row must have these `fields`, each with a check of its value. `row_fault` checks a row of them.
    Raises ValueError for a file that cannot be read or has no row, and for the first bad line, naming file and line.
    """
    needed = ", ".join(map(repr, fields))
    if not path.is_file():
        raise ValueError(f"there is no file {path}; it should hold one JSON object per line with {needed}")
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:  # Windows puts a byte order mark before UTF-8
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
    """The fields of one line's JSON object, checked. Raises ValueError that begins with `where`."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists within lists
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}; a JSON object is needed")
    found = cast("dict[str, Any]", row)
    for name, fault_of in fields.items():
        if name not in found:
            raise ValueError(f"{where} lacks {name!r}; it has {', '.join(map(repr, found)) or 'no field'}")
        if fault := surrogate_fault(found[name]) or fault_of(found[name]):
            raise ValueError(f"{where}: {name!r} {fault}")
    return {name: found[name] for name in fields}


@functools.lru_cache(maxsize=4)  # `stream` asks for every item, and a step may span two epochs
def numpy_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """The order of examples and preferences; see `Order`."""
    return np.random.default_rng([seed, epoch]).permutation(num_items).tolist()


@functools.lru_cache(maxsize=4)
def python_order(num_items: int, seed: int, epoch: int) -> list[int]:
    """The order of environments over rows; see `Order`."""
    order = list(range(num_items))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def stream(items: Sequence[T], order: Order, seed: int, start: int, count: int) -> list[T]:
    """Items start to start + count - 1 of an endless stream. Every epoch has every item once, in its own order."""
    positions = (divmod(number, len(items)) for number in range(start, start + count))
    return [items[order(len(items), seed, epoch)[i]] for epoch, i in positions]


def is_eval(text: str) -> bool:
    """Whether items of this text are held out, whatever its white space is. True for a tenth of all texts."""
    return hashed_number(f"split/{spaced_alike(text)}") < EVAL_FRACTION * 2**31


def split(items: Iterable[T], text_of: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Training and held-out items, in order. Items with the same text are on the same side."""
    sides: tuple[list[T], list[T]] = ([], [])
    for item in items:
        sides[is_eval(text_of(item))].append(item)
    return sides


def without_held_out(items: Iterable[T], held_out: Iterable[T], text_of: Callable[[T], str]) -> list[T]:
    """The items whose text, but for white space, is none of the held-out items'."""
    texts = {spaced_alike(text_of(item)) for item in held_out}
    return [item for item in items if spaced_alike(text_of(item)) not in texts]


def spaced_alike(value: object) -> object:
    """A JSON value whose texts have one blank between their words: prompts that are equal then ask the same."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {name: spaced_alike(item) for name, item in cast("Mapping[str, object]", value).items()}
    return [spaced_alike(item) for item in cast("list[object]", value)] if isinstance(value, list | tuple) else value


def content_id(value: object) -> str:
    """An id of a JSON value, computed from its content: the same on every machine."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def hashed_number(key: str) -> int:
    """A number in 0..2^31-1 computed from the key alone: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
