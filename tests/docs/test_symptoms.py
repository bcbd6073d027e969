"""docs/symptoms.md: each entry has a command, and the metrics that its commands print are known ones."""

import re

import pytest

from tests.docs.commands import commands_of
from tests.docs.pages import PLUGINS, ROOT, blocks_of, names_in_tables

PAGE = ROOT / "docs" / "symptoms.md"
ENTRIES = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
DOCUMENTED = names_in_tables(ROOT / "docs" / "metrics.md").union(
    *(names_in_tables(plugin / "README.md") for plugin in PLUGINS)
)


def test_there_are_forty_entries_in_order() -> None:
    assert [entry.partition(".")[0] for entry in ENTRIES] == [str(number + 1) for number in range(len(ENTRIES))]
    assert len(ENTRIES) >= 40


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.partition("\n")[0])
def test_an_entry_has_a_command_and_then_says_what_to_change(entry: str) -> None:
    _, command, after = entry.split("```")[:3]
    assert command.startswith("bash\n")
    assert len(after.partition("\n## ")[0].split()) > 8


def test_the_metrics_that_the_page_prints_are_documented() -> None:
    commands = [words for block in blocks_of(PAGE) if block.language == "bash" for words in commands_of(block.text)]
    names = {name for words in commands if "metric.py" in words for name in words[3:]}
    assert len(names) > 20
    for name in names:
        shown = re.sub(r"(?<=memory_peak_bytes_).*(?=_max)", "<verb>", re.sub("_(low|high)$", "", name))
        assert shown in DOCUMENTED, name
