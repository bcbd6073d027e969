"""Columns of data sets: files of JSON, CSV or Parquet, folders of files, and the Hugging Face Hub.

The package `datasets` reads Parquet, folders of images and the Hub. JSON and CSV are read here, so that a number stays
the one that the file spells.
"""

import csv
import glob
import json
import math
from collections.abc import Generator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rl.checks import surrogate_fault

if TYPE_CHECKING:
    from datasets import Dataset

_MOST_DIGITS = 4300  # as Python's limit for whole numbers
_TEXT_FORMATS = {".jsonl", ".json", ".csv"}
_FILE_FORMATS = (".jsonl", ".json", ".parquet", ".csv")
_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


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


def text_of(value: object, where: str) -> str:
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
) -> dict[str, Sequence[object]]:
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
) -> tuple[dict[str, Sequence[object]], Sequence[str]]:
    """The columns of these that the split has, and the names of all."""
    import datasets

    named = {part.partition("[")[0].strip() for part in split.split("+")}
    names, rows = dict[str, None](), {name: list[dict[str, object]]() for name in files}
    for name in named & files.keys():
        for file in files[name]:
            rows[name] += _csv_rows(file, columns, names) if file.suffix == ".csv" else _json_rows(file, columns, names)
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found) for name, found in rows.items()})
    chosen = [row for part in parts for row in rows[part.splitname][part.from_ : part.to]]
    return {name: [row.get(name) for row in chosen] for name in columns if name in names}, [*names]


def _csv_rows(file: Path, columns: Sequence[str], names: dict[str, None]) -> list[dict[str, object]]:
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
    reading = arrow_csv.ReadOptions(block_size=min(max(file.stat().st_size, 1 << 20), (1 << 31) - 1))  # holds any row
    rows = arrow_csv.read_csv(file, reading, parsing, options).to_pylist() if wanted else []
    return [{name: cell or None for name, cell in row.items()} for row in rows]


def _json_rows(file: Path, columns: Sequence[str], names: dict[str, None]) -> Generator[dict[str, object]]:
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
                found = cast("dict[str, object]", row)
                names |= dict.fromkeys(found)
                yield {name: found[name] for name in columns if name in found}


def _read_table(
    dataset: str, split: str, subset: str | None, revision: str | None, columns: Sequence[str]
) -> tuple[dict[str, Sequence[object]], Sequence[str]]:
    """The columns of these that a data set of other files, or of the Hub, has, and the names of all."""
    import datasets

    path = Path(dataset).expanduser()
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


def _values(table: "Dataset", name: str) -> Sequence[object]:
    """A column: names of labels, decimals of floats as their type has them, images as they are stored."""
    import datasets

    kind = table.features[name]
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
