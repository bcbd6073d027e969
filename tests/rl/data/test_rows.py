from pathlib import Path

import pytest

from rl.checks import prompt_fault, text_fault
from rl.data.rows import no_fault, read_columns, read_rows


def test_rows_are_read_in_order_and_empty_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2, "b": "\u2028"}\n', encoding="utf-8")
    assert read_rows(path, {"a": no_fault}) == [{"a": 1}, {"a": 2, "b": "\u2028"}]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl cannot be read: .*utf-8"):
        read_rows(path, {"a": no_fault})


def test_a_fault_of_a_whole_row_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: is even"):
        read_rows(path, {"a": no_fault}, lambda row: "is even" if row["a"] % 2 == 0 else "")


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ("text", ""),
        ([{"role": "user", "content": "hello"}], ""),
        (({"role": "user", "content": "hello"},), ""),
        ("", "is empty; text is needed"),
        ([], "is []; text, or messages with 'role' and 'content', are needed"),
        ([{"role": "user", "content": None}], "each message needs 'role' and 'content', both text"),
        (["hello"], "holds 'hello'; each message needs"),
    ],
)
def test_prompts_are_text_or_messages(prompt: object, fault: str) -> None:
    assert fault in prompt_fault(prompt)
    assert bool(prompt_fault(prompt)) == bool(fault)


def test_texts_are_not_empty() -> None:
    assert [text_fault(value) for value in ("a", "", 7)] == ["", "is empty; text is needed", "is a int; text is needed"]


def test_a_folder_whose_path_is_a_pattern_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "numbers [v1]"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"answer": "1"}\n')
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(ValueError, match=r"dataset is '.*', which cannot be loaded: `datasets` takes brackets"):
            read_columns(str(path), columns=["answer"], split="train", subset=None, revision=None, field="dataset")
