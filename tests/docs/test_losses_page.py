"""docs/losses.md lists every loss and advantage as its docstring says.

`.venv/bin/python -m tests.docs.test_losses_page` writes the lists.
"""

import textwrap

from controller.commands.recipes import advantage_lines, loss_lines
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "losses.md"
LOSSES, ADVANTAGES = "<!-- losses -->", "<!-- advantages -->"


def written(page: str) -> str:
    """The page with the lists that the code gives. The text before each list stays."""
    head, _, rest = page.partition(LOSSES)
    middle = rest[rest.index("# Advantages") :].partition(ADVANTAGES)[0]
    lists = [_wrapped("\n".join(lines)) for lines in (loss_lines(), advantage_lines())]
    return f"{head}{LOSSES}\n\n{lists[0]}\n\n{middle}{ADVANTAGES}\n\n{lists[1]}\n"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in text.strip().splitlines())


def test_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == written(PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
