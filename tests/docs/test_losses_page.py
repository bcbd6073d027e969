"""docs/losses.md lists every loss and advantage of the core as its docstring says.

`.venv/bin/python -m tests.docs.test_losses_page` writes the lists.
"""

import re
import textwrap
from collections.abc import Iterable, Set

from controller.commands.recipes import advantage_lines, loss_lines
from rl.advantages import ADVANTAGES
from rl.algorithms.preferences import PAIR_LOSSES
from rl.losses import LOSSES
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "losses.md"
_LOSSES, _ADVANTAGES = "<!-- losses -->", "<!-- advantages -->"


def written(page: str, losses: Set[str], advantages: Set[str], *, pairs: bool) -> str:
    """The page with the lists that the code gives of these names. The text before each list stays."""
    head, _, rest = page.partition(_LOSSES)
    middle = rest[rest.index("# Advantages") :].partition(_ADVANTAGES)[0]
    of_pairs = {"Losses of pairs", *PAIR_LOSSES} if pairs else set[str]()
    lists = [_wrapped(loss_lines(), {*losses, *of_pairs}), _wrapped(advantage_lines(), advantages)]
    return f"{head}{_LOSSES}\n\n{lists[0]}\n\n{middle}{_ADVANTAGES}\n\n{lists[1]}\n"


def _wrapped(lines: Iterable[str], names: Set[str]) -> str:
    """Those parts of a list whose headings are among these names."""
    parts = re.split(r"^(?=#+ )", "\n".join(lines), flags=re.MULTILINE)
    text = "".join(part for part in parts if part.partition("\n")[0].lstrip("# ") in names)
    return "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) for line in text.strip().splitlines())


def test_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == written(PAGE.read_text(), LOSSES.keys(), ADVANTAGES.keys(), pairs=True)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), LOSSES.keys(), ADVANTAGES.keys(), pairs=True))
