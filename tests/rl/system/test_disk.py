"""Whole lines at the end of a file."""

from pathlib import Path

import pytest

from rl.system.disk import drop_unfinished_line


@pytest.mark.parametrize(
    ("text", "kept"),
    [("", ""), ("ab", ""), ("a\n", "a\n"), ("a\nb", "a\n"), ("a\n" + "b" * 200_000, "a\n"), ("b" * 200_000, "")],
)
def test_only_an_unfinished_line_is_dropped(text: str, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    drop_unfinished_line(file)
    assert file.read_text() == kept
    drop_unfinished_line(tmp_path / "missing")
