"""Rows of data sets: read from files and hubs, checked, split into training and held-out rows, and streamed.

A "fault" is a phrase that says what is wrong with a value, or "". Columns of the Hugging Face Hub and of files other
than JSONL are read through the package `datasets`. Item i of a stream is a pure function of (seed, i), so that a run
can be resumed anywhere. Whether an item is held out depends only on its text, so that it is on the same side in every
file, run and process.
"""

import functools
import glob
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from rl.checks import surrogate_fault

Fault = Callable[[Any], str]
EVAL_FRACTION = 0.1
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
T = TypeVar("T")


def no_fault(_value: Any) -> str:
    """Accepts every value."""
    return ""


def read_rows(path: Path, fields: Mapping[str, Fault], row_fault: Fault = no_fault) -> list[dict[str, Any]]:
    """The JSON objects of a file with one per line. Empty lines are skipped.

    `fields` are the names that every row must have, each with a check of its value. `row_fault` checks a whole row.
    Raises ValueError for a file that cannot be read or has no row, and for the first bad line, naming file and line.
    """
    path, needed = Path(path), ", ".join(map(repr, fields))
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
    """One line's JSON object with its fields checked. Raises ValueError that begins with `where`."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists within lists
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


def read_columns(
    dataset: str, *, columns: Sequence[str], split: str, subset: str | None, revision: str | None, field: str
) -> list[tuple[str, ...]]:
    """The texts of these columns, row by row. Numbers become decimals, never powers of ten: 0.00001, not 1e-05.

    `dataset` is a file (JSON lines, JSON, Parquet, CSV), a folder of such files or one that `save_to_disk` wrote, or
    `ORG/NAME` of the Hub. Raises ValueError, naming `field`, if it cannot be loaded, lacks a column (with the names of
    its columns), or holds a row that is neither text nor a number.
    """
    table = load_table(dataset, split=split, subset=subset, revision=revision, field=field)
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{field} is {dataset!r}, whose split {split!r} has no column {missing[0]!r}; it has the columns "
            f"{', '.join(map(repr, table.column_names))}"
        )
    kinds = [_float_type(table.features[name]) for name in columns]
    texts = [
        _texts(table[name], kind, f"{field} {dataset!r}, split {split!r}, column {name!r}")
        for name, kind in zip(columns, kinds, strict=True)
    ]
    return list(zip(*texts, strict=True))


def _float_type(feature: Any) -> type[np.floating]:
    """The type of a column of floats, which decides how many digits a number has."""
    return {"float16": np.float16, "float32": np.float32}.get(getattr(feature, "dtype", ""), np.float64)


def _texts(values: Sequence[Any], float_type: type[np.floating], where: str) -> list[str]:
    texts = list[str]()
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal) or _is_no_number(value):
            raise ValueError(f"{where}: row {number} is {value!r:.80}; text or a number is needed")
        if fault := isinstance(value, str) and surrogate_fault(value):
            raise ValueError(f"{where}: row {number} {fault}")
        if isinstance(value, float):
            texts.append(np.format_float_positional(float_type(value), trim="0"))
        else:
            texts.append(format(value, "f") if isinstance(value, Decimal) else str(value))
    return texts


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float | Decimal) and not math.isfinite(value)


def load_table(dataset: str, *, split: str, subset: str | None, revision: str | None, field: str) -> Any:
    """The split as a table of `datasets`. Raises ValueError, naming `field`, if it cannot be loaded."""
    import datasets  # importing it takes a second, which `--help` should not

    path = Path(dataset).expanduser()
    try:
        if path.is_file():
            if path.suffix not in _FILE_FORMATS:
                raise ValueError(f"a file must end in one of {', '.join(_FILE_FORMATS)}")
            return datasets.load_dataset(_FILE_FORMATS[path.suffix], data_files=glob.escape(str(path)), split=split)
        if path.is_dir():
            if (path / "dataset_dict.json").exists():
                return datasets.load_from_disk(str(path))[split]
            if (path / "state.json").exists():
                return datasets.load_from_disk(str(path))
            if glob.escape(full := str(path.resolve())) != full:
                raise ValueError("`datasets` takes brackets, stars and question marks in a folder's path for a pattern")
            return datasets.load_dataset(str(path), subset, split=split)
        if path.suffix in _FILE_FORMATS:
            raise ValueError("there is no such file")
        return datasets.load_dataset(dataset, subset, split=split, revision=revision)
    except Exception as error:  # of the Hub, the network, pyarrow, or the file's content
        raise ValueError(f"{field} is {dataset!r}, which cannot be loaded: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """What went wrong, in one line; of a chain of errors, the first has the cause."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [str(e).strip().partition("\n")[0] for e in dict.fromkeys((error, cause))]
    return " - ".join(dict.fromkeys(line or type(error).__name__ for line in lines))


class Order(Protocol):
    """The order in which one epoch of a stream goes through the items."""

    def __call__(self, num_items: int, seed: int, epoch: int) -> Sequence[int]:
        """A permutation of 0..num_items-1."""
        ...


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
    """Whether items of this text are held out. True for a tenth of all texts."""
    return hashed_number(f"split/{text}") < EVAL_FRACTION * 2**31


def split(items: Iterable[T], text_of: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Training and held-out items, in order. Items with the same text are on the same side."""
    sides: tuple[list[T], list[T]] = ([], [])
    for item in items:
        sides[is_eval(text_of(item))].append(item)
    return sides


def without_held_out(items: Iterable[T], held_out: Iterable[T], text_of: Callable[[T], str]) -> list[T]:
    """The items whose text, but for white space around it, is none of the held-out items'."""
    texts = {text_of(item).strip() for item in held_out}
    return [item for item in items if text_of(item).strip() not in texts]


def content_id(value: Any) -> str:
    """An id of a JSON value, computed from its content: the same on every machine."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def hashed_number(key: str) -> int:
    """A number in 0..2^31-1 computed from the key alone: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
