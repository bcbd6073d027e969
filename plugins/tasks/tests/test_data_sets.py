"""Columns of data sets, as the files spell them."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ownloop_tasks.data_sets import read_columns


def test_a_folder_whose_path_is_a_pattern_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "numbers [v1]"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"answer": "1"}\n')
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(ValueError, match=r"dataset is '.*', which cannot be loaded: `datasets` takes brackets"):
            read_columns(str(path), columns=["answer"], split="train", subset=None, revision=None, field="dataset")


def _columns(file: Path, *columns: str, split: str = "train") -> list[tuple[str, ...]]:
    return read_columns(str(file), columns=columns, split=split, subset=None, revision=None, field="dataset")


EXACT = [
    "9007199254740993",
    "123456789012345678901234567890",
    "0.1234567890123456789",
    "2.50",
    "1e-05",
    "7",
    "-0.0",
    "1e400",
    "1" * 400,
]
"""Numbers as a file spells them, of which a float would become another."""


@pytest.mark.stranger("2.D4")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_number_is_the_one_that_the_file_spells(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"rows.{kind}"
    rows = [f'{{"q": "w{i}", "a": {number}}}' for i, number in enumerate(EXACT)]
    texts = {
        "jsonl": "\n".join(rows),
        "json": f"[{', '.join(rows)}]",
        "csv": "q,a\n" + "\n".join(f"w,{n}" for n in EXACT),
    }
    file.write_text(texts[kind])
    read = [answer for (answer,) in _columns(file, "a")]
    assert [Decimal(text) for text in read] == [Decimal(text) for text in EXACT]
    assert read == EXACT if kind == "csv" else "0.00001" in read


@pytest.mark.stranger("2.D4")
def test_cells_of_a_csv_are_text(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(b'\xef\xbb\xbfq,a\n"one\ntwo",007\n"x, ""y""",NA\nnull,1e3\n" pad ",True\n')
    assert _columns(file, "q", "a") == [("one\ntwo", "007"), ('x, "y"', "NA"), ("null", "1e3"), (" pad ", "True")]
    file.write_text(f"q,a\n{'x' * (5 << 20)},1\ny,2\n")
    assert [len(question) for question, _ in _columns(file, "q", "a")] == [5 << 20, 1]
    file.write_text("q,a,a\nw,1,2\n")
    with pytest.raises(ValueError, match="several columns 'a'"):
        _columns(file, "a")
    file.write_text("q,a\nw,\n")
    with pytest.raises(ValueError, match="column 'a': row 0 is None"):
        _columns(file, "a")


@pytest.mark.stranger("2.D4")
@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_a_float_of_parquet_is_itself(tmp_path: Path, kind: str) -> None:
    numbers = np.array([2**11, 3, 0.1, 1.5, 2**-14, 1e-7], kind)
    numbers = (
        np.append(numbers, np.array([2.0**60, 2.0**31 * 3, 1e22, 123456789], kind)) if kind != "float16" else numbers
    )
    pq.write_table(pa.table({"a": pa.array(numbers), "b": pa.array(numbers)}), tmp_path / "rows.parquet")
    for (text,), number in zip(_columns(tmp_path / "rows.parquet", "a"), numbers, strict=True):
        assert np.dtype(kind).type(text) == number
        assert Decimal(text) == Decimal(float(number)) or not float(number).is_integer()


@pytest.mark.stranger("2.D5")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "folder"])
def test_a_column_that_nobody_asked_for_may_be_anything(tmp_path: Path, kind: str) -> None:
    others = [
        "",
        '"other": null, ',
        '"other": 7, ',
        '"other": "text", "more": {}, ',
        '"other": [{"deep": "\\ud800"}], ',
    ]
    rows = [f'{{{other}"q": "w{i}", "a": "{i}"}}' for i, other in enumerate(others)]
    file = tmp_path / ("train.jsonl" if kind == "folder" else f"rows.{kind}")
    texts = {"json": f"[{', '.join(rows)}]", "csv": "other,q,a\n,w0,0\n,w1,1\n7,w2,2\ntext,w3,3\n[],w4,4\n"}
    file.write_text(texts.get(kind, "\n".join(rows)))
    read = _columns(tmp_path if kind == "folder" else file, "q", "a")
    assert read == [(f"w{i}", str(i)) for i in range(5)]
    assert _columns(file, "a", split="train[1:3]") == [("1",), ("2",)]


@pytest.mark.stranger("2.D5")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n{"a": ', "rows.jsonl:2 is not JSON"),
        ("7\n", "rows.jsonl:1 holds a int"),
        ('{"a": 1}\n{"b": 2}', "column 'a': row 1 is None"),
        ('{"b": 2}', "no column 'a'; it has the columns 'b'"),
        ("", "no column 'a'"),
        ('{"a": 1e5000}', "column 'a': row 0 is"),
        ('{"a": NaN}', "column 'a': row 0 is nan"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        _columns(tmp_path / "rows.jsonl", "a")
