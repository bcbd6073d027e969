"""The code blocks of the repository's pages, and the comments that say how a test is to treat them."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
INSTALLED = [plugin for plugin in PLUGINS if importlib.util.find_spec(f"ownloop_{plugin.name}")]
PAGES = sorted(
    page for folder in (ROOT, *INSTALLED) for pattern in ("*.md", "docs/*.md") for page in folder.glob(pattern)
)
"""The pages of the core, and those of the plug-ins that are installed here."""

_BLOCK = re.compile(
    r"(?:^<!-- test: (?P<mark>[^\n]+) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of the block's first line of code, from 1."""
    language: str
    text: str
    mark: str
    """What the comment before the block says after `test:`, or nothing."""

    def argument(self, verb: str) -> str:
        """The rest of a mark that begins with `verb`, or nothing."""
        return self.mark.removeprefix(verb + " ") if self.mark.startswith(verb + " ") else ""


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            text=match["text"],
            mark=match["mark"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def table_of_architectures(page: Path) -> dict[str, str]:
    """Architecture -> the engines that a page names for it, in its table of models."""
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): row[3] for row in rows if "For" in row[1]}


def names_in_tables(page: Path, section: str = "") -> set[str]:
    """Everything in code type in the first cell of a row, in the page or in the part below a heading of it."""
    text = page.read_text(encoding="utf-8")
    if section:
        text = text[text.index(f"\n## {section}\n") + 1 :].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
