"""Rows of data sets: read from files and hubs, checked, split into training and held-out rows, and streamed.

A "fault" is a phrase that says what is wrong with a value, or "". Parquet, folders of images and the Hugging Face Hub
are read through the package `datasets`. Item i of a stream is a pure function of (seed, i), so that a run
can be resumed anywhere. Whether an item is held out depends only on its text, so that it is on the same side in every
file, run and process.
"""

import csv
import functools
import glob
import hashlib
import json
import math
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from rl.checks import surrogate_fault

Fault = Callable[[Any], str]
EVAL_FRACTION = 0.1
_MOST_DIGITS = 4300  # as Python's limit for whole numbers
_TEXT_FORMATS = {".jsonl", ".json", ".csv"}
_FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
T = TypeVar("T")


def no_fault(_value: Any) -> str:
    """Accepts every value."""
    return ""


def read_rows(path: Path, fields: Mapping[str, Fault], row_fault: Fault = no_fault) -> list[dict[str, Any]]:
    """The fields of the JSON objects of a file with one per line. Empty lines are skipped, and all other fields.

    Every row must have these `fields`, each with a check of its value. `row_fault` checks a row of them.
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
    """The fields of one line's JSON object, checked. Raises ValueError that begins with `where`."""
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, and lists within lists
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        needed = ", ".join(map(repr, fields))
        raise ValueError(f"{where} is a {type(row).__name__}; a JSON object with {needed} is needed")
    found = cast("dict[str, Any]", row)
    for name, fault_of in fields.items():
        if name not in found:
            raise ValueError(f"{where} lacks {name!r}; it has {', '.join(map(repr, found)) or 'no field'}")
        if fault := surrogate_fault(found[name]) or fault_of(found[name]):
            raise ValueError(f"{where}: {name!r} {fault}")
    return {name: found[name] for name in fields}


def read_columns(
    dataset: str, *, columns: Sequence[str], split: str, subset: str | None, revision: str | None, field: str
) -> list[tuple[str, ...]]:
    """The texts of these columns, row by row; see `load_columns` and `text_of`, which raise ValueError."""
    loaded = load_columns(dataset, columns=columns, split=split, subset=subset, revision=revision, field=field)
    where = f"{field} {dataset!r}, split {split!r}, column"
    texts = [
        [text_of(value, f"{where} {name!r}: row {number}") for number, value in enumerate(loaded[name])]
        for name in columns
    ]
    return list(zip(*texts, strict=True))


def text_of(value: Any, where: str) -> str:
    """The text that a value says: numbers are decimals, never powers of ten: 0.00001, not 1e-05.

    Raises ValueError, beginning with `where`, for what is neither text nor a finite number.
    """
    if isinstance(value, Decimal):
        is_known = value.is_finite() and abs(value.adjusted()) <= _MOST_DIGITS
    else:
        is_known = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    if not is_known or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.80}; text or a number is needed")
    if isinstance(value, float):
        return _decimal(value, np.float64)
    if isinstance(value, Decimal):
        return format(value, "f")
    if fault := surrogate_fault(text := str(value)):
        raise ValueError(f"{where} {fault}")
    return text


def _decimal(value: float, kind: type[np.floating]) -> str:
    """The fewest digits that mean this number of its type; of a whole number, those that it has."""
    if value.is_integer():
        return f"{int(value)}.0"
    return np.format_float_positional(kind(value), trim="0")


def load_columns(
    dataset: str, *, columns: Sequence[str], split: str, subset: str | None, revision: str | None, field: str
) -> dict[str, Sequence[Any]]:
    """The values of these columns, by name. No other column is looked at.

    `dataset` is a file (JSON lines, JSON, Parquet, CSV), a folder of such files or one that `save_to_disk` wrote, or
    `ORG/NAME` of the Hub. Every cell of a CSV is text, an empty one None. A number of JSON that is not whole is a
    `Decimal` with the digits of the file. A class label is its name. Images are not decoded. A value that a row lacks
    is None. Raises ValueError, naming `field`, if it cannot be loaded or lacks a column (with the names that it has).
    """
    try:
        files = _text_files(dataset, subset)
        if files:
            found, names = _read_text_files(files, split, columns)
        else:
            found, names = _read_table(dataset, split, subset, revision, columns)
    except Exception as error:  # of the Hub, the network, pyarrow, or the file's content
        raise ValueError(f"{field} is {dataset!r}, which cannot be loaded: {_sentence(error)}") from error
    if missing := [name for name in columns if name not in found]:
        raise ValueError(
            f"{field} is {dataset!r}, whose split {split!r} has no column {missing[0]!r}; it has the columns "
            f"{', '.join(map(repr, names))}"
        )
    return found


def _text_files(dataset: str, subset: str | None) -> dict[str, list[Path]]:
    """The files of each split of a local data set of JSON or CSV, and nothing for any other data set."""
    import datasets  # importing it takes a second, which `--help` should not

    path = Path(dataset).expanduser()
    if path.is_file():
        if path.suffix not in _FILE_FORMATS:
            raise ValueError(f"a file must end in one of {', '.join(_FILE_FORMATS)}")
        return {"train": [path]} if path.suffix in _TEXT_FORMATS else {}
    if not path.is_dir() or _is_saved(path):
        return {}
    if glob.escape(full := str(path.resolve())) != full:
        raise ValueError("`datasets` takes brackets, stars and question marks in a folder's path for a pattern")
    found = datasets.load_dataset_builder(str(path), subset).config.data_files or {}
    files = {name: [Path(file) for file in listed] for name, listed in found.items()}
    return files if {file.suffix for listed in files.values() for file in listed} <= _TEXT_FORMATS else {}


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote the folder."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _read_text_files(
    files: Mapping[str, Sequence[Path]], split: str, columns: Sequence[str]
) -> tuple[dict[str, Sequence[Any]], Sequence[str]]:
    """The columns of these that the split has, and the names of all."""
    import datasets

    named = {part.partition("[")[0].strip() for part in split.split("+")}
    names, rows = dict[str, None](), {name: list[dict[str, Any]]() for name in files}
    for name in named & files.keys():
        for file in files[name]:
            rows[name] += _csv_rows(file, columns, names) if file.suffix == ".csv" else _json_rows(file, columns, names)
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found) for name, found in rows.items()})
    chosen = [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]
    return {name: [row.get(name) for row in chosen] for name in columns if name in names}, [*names]


def _csv_rows(file: Path, columns: Sequence[str], names: dict[str, None]) -> list[dict[str, Any]]:
    """The cells of these columns as text, None if empty. Adds the file's columns to `names`."""
    from pyarrow import csv as arrow_csv
    from pyarrow import string

    with file.open(encoding="utf-8-sig", newline="") as stream:
        header = next(csv.reader(stream), [])
    names |= dict.fromkeys(header)
    wanted = [name for name in columns if name in header]
    if twice := [name for name in wanted if header.count(name) > 1]:
        raise ValueError(f"{file.name} has several columns {twice[0]!r}; one is needed")
    options = arrow_csv.ConvertOptions(column_types=dict.fromkeys(wanted, string()), include_columns=wanted)
    parsing = arrow_csv.ParseOptions(newlines_in_values=True)
    rows = arrow_csv.read_csv(file, parse_options=parsing, convert_options=options).to_pylist() if wanted else []
    return [{name: cell or None for name, cell in row.items()} for row in rows]


def _json_rows(file: Path, columns: Sequence[str], names: dict[str, None]) -> Generator[dict[str, Any]]:
    """The values of these columns, of one object a line or of a list of objects. Adds the columns to `names`."""
    with file.open(encoding="utf-8-sig") as lines:
        start = lines.read(1)
        while start.isspace():
            start = lines.read(1)
        lines.seek(0)
        is_list = start == "["
        read = [lines.read()] if is_list else lines
        for number, text in enumerate(read, start=1):
            if not text.strip():
                continue
            try:
                value: Any = json.loads(text, parse_float=Decimal)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file.name}:{number} is not JSON: {error}") from None
            for row in value if is_list else [value]:
                if not isinstance(row, dict):
                    raise ValueError(f"{file.name}:{number} holds a {type(row).__name__}; objects are needed")
                found = cast("dict[str, Any]", row)
                names |= dict.fromkeys(found)
                yield {name: found[name] for name in columns if name in found}


def _read_table(
    dataset: str, split: str, subset: str | None, revision: str | None, columns: Sequence[str]
) -> tuple[dict[str, Sequence[Any]], Sequence[str]]:
    """The columns of these that a data set of other files, or of the Hub, has, and the names of all."""
    import datasets

    path, table = Path(dataset).expanduser(), cast("Any", None)
    if path.is_file():
        table = datasets.load_dataset("parquet", data_files=glob.escape(str(path)), split=split)
    elif path.is_dir() and _is_saved(path):
        table = datasets.load_from_disk(str(path))
        table = table[split] if isinstance(table, datasets.DatasetDict) else table
    elif path.is_dir():
        table = datasets.load_dataset(str(path), subset, split=split)
    elif path.suffix in _FILE_FORMATS:
        raise ValueError("there is no such file")
    else:
        table = datasets.load_dataset(dataset, subset, split=split, revision=revision)
    return {name: _values(table, name) for name in columns if name in table.column_names}, table.column_names


def _values(table: Any, name: str) -> Sequence[Any]:
    """A column: names of labels, decimals of floats as their type has them, images as they are stored."""
    import datasets

    kind: Any = table.features[name]
    if isinstance(kind, datasets.ClassLabel):
        return [None if label is None else kind.names[label] for label in table[name]]
    if isinstance(kind, datasets.Image):
        return table.cast_column(name, datasets.Image(decode=False))[name]
    if isinstance(getattr(kind, "feature", None), datasets.Image):
        return table.cast_column(name, datasets.List(datasets.Image(decode=False)))[name]
    if getattr(kind, "dtype", "") in _FLOATS:
        width = _FLOATS[kind.dtype]
        return [Decimal(_decimal(n, width)) if isinstance(n, float) and math.isfinite(n) else n for n in table[name]]
    return table[name]


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


def spaced_alike(value: Any) -> Any:
    """A JSON value whose texts have one blank between their words: prompts that are equal then ask the same."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {name: spaced_alike(item) for name, item in cast("Mapping[str, Any]", value).items()}
    return [spaced_alike(item) for item in cast("list[Any]", value)] if isinstance(value, list | tuple) else value


def content_id(value: Any) -> str:
    """An id of a JSON value, computed from its content: the same on every machine."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def hashed_number(key: str) -> int:
    """A number in 0..2^31-1 computed from the key alone: the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 1
