"""Writes the table of the page what_fits.md: `python -m plugins.plan.tests.what_fits`."""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import product

from controller.commands.command_line import parse_command
from tests.docs.pages import ROOT

PAGE = ROOT / "plugins" / "plan" / "docs" / "what_fits.md"
MODELS = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
KINDS = {"all weights": "", "LoRA": " --lora.rank 32"}
CARDS = {"24 GB": "rtx4090", "48 GB": "l40s", "80 GB": "h100"}
COUNTS = (1, 2, 8)
TOKENS = 256 * 2048
"""Of the completions of a step of `grpo_qwen3_gpu`, each as long as it may be."""


def command(model: str, kind: str, card: str, count: int) -> str:
    """The command whose first row is a cell of the table."""
    return f"ownloop plan grpo_qwen3_gpu --model Qwen/Qwen3-{model} --gpu {CARDS[card]} --search {count}{KINDS[kind]}"


def printed(model: str, kind: str, card: str, count: int) -> str:
    """The output of that command, or nothing if it refuses."""
    output = io.StringIO()
    with redirect_stdout(output):
        try:
            parse_command(command(model, kind, card, count).split()[1:]).run()
        except ValueError:  # no replica of the generator fits
            return ""
    return output.getvalue()


def cell(output: str) -> str:
    """Tokens a second of the fastest layout, with three digits; a dash if none fits."""
    if (row := re.search(r"^\| \d.*\| (\d+\.\d+) \|$", output, re.MULTILINE)) is None:
        return "-"
    rate = TOKENS / float(row[1])
    digits = 10 ** max(0, len(str(int(rate))) - 3)
    return f"{round(rate / digits) * digits:,}"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| model | trained | " + " | ".join(f"{count} x {card}" for card, count in product(CARDS, COUNTS)) + " |"
    yield "|---|---|" + "---|" * len(CARDS) * len(COUNTS)
    for model, kind in product(MODELS, KINDS):
        cells = (cell(printed(model, kind, card, count)) for card, count in product(CARDS, COUNTS))
        yield f"| Qwen3-{model} | {kind} | " + " | ".join(cells) + " |"


def cells_of_the_page() -> dict[tuple[str, str, str, int], str]:
    """Model, kind, card and count -> what the page says."""
    rows = re.findall(r"^\| Qwen3-(\S+) \| ([\w ]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        (model, kind, card, count): text
        for model, kind, cells in rows
        for (card, count), text in zip(product(CARDS, COUNTS), cells.split(" | "), strict=True)
    }


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index("| model | trained |"), text.index("\n\n", text.index("| model | trained |"))
    PAGE.write_text(text[:start] + "\n".join(table()) + text[end:], encoding="utf-8")
