from pathlib import Path

import pytest

from rl.checks import prompt_fault, text_fault
from rl.data.rows import is_eval, no_fault, read_rows, spaced_alike, without_held_out


def test_rows_are_read_in_order_and_empty_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "b": "\\ud800"}\n\n{"a": 2, "b": "\u2028"}\n', encoding="utf-8")
    assert read_rows(path, {"a": no_fault}) == [{"a": 1}, {"a": 2}]


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


@pytest.mark.stranger("2.D10")
def test_prompts_that_differ_in_white_space_are_on_one_side() -> None:
    texts = [f"what is\n{number} + 1?" for number in range(200)]
    spellings = [
        lambda t: t,
        lambda t: f" {t}",
        lambda t: f"{t}\n",
        lambda t: t.replace("\n", "\r\n"),
        lambda t: t.replace(" ", "  "),
    ]
    for text in texts:
        assert len({is_eval(spelled(text)) for spelled in spellings}) == 1
    held_out = texts[:20]
    for spelled in spellings:
        assert without_held_out(map(spelled, texts), held_out, str) == [*map(spelled, texts[20:])]
    assert spaced_alike([{"role": "user", "content": [{"text": " a\nb "}]}]) == [
        {"role": "user", "content": [{"text": "a b"}]}
    ]
