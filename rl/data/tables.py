"""Columns of a dataset, from the Hugging Face Hub or from disk, through the package `datasets`."""

import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from rl.data.rows import surrogate_fault

_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def read_columns(
    dataset: str, *, columns: Sequence[str], split: str, subset: str | None, revision: str | None, field: str
) -> list[tuple[str, ...]]:
    """The texts of these columns, row by row. Numbers become decimals, never powers of ten: 0.00001, not 1e-05.

    `dataset` is a file (JSON lines, JSON, Parquet, CSV), a folder of such files or one that `save_to_disk` wrote, or
    `ORG/NAME` of the Hub. Raises ValueError, naming `field`, if it cannot be loaded, lacks a column (with the names of
    those that it has), or holds a row that is neither text nor a number.
    """
    table = _load(dataset, split=split, subset=subset, revision=revision, field=field)
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


def _load(dataset: str, *, split: str, subset: str | None, revision: str | None, field: str) -> Any:
    """The split as a table of `datasets`."""
    import datasets  # importing it takes a second, which `--help` should not

    path = Path(dataset).expanduser()
    try:
        if path.is_file():
            if path.suffix not in _FILE_FORMATS:
                raise ValueError(f"a file must end in one of {', '.join(_FILE_FORMATS)}")
            return datasets.load_dataset(_FILE_FORMATS[path.suffix], data_files=str(path), split=split)
        if path.is_dir():
            if (path / "dataset_dict.json").exists():
                return datasets.load_from_disk(str(path))[split]
            if (path / "state.json").exists():
                return datasets.load_from_disk(str(path))
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
