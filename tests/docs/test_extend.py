"""docs/extend.md lists every kind of entry points, and every module of the core that a plug-in imports."""

from rl.system import plugins
from tests.docs.extend import KINDS, PAGE, page


def test_the_page_has_every_kind() -> None:
    assert tuple(KINDS) == plugins.KINDS
    assert len(KINDS) <= 8


def test_the_page_follows_docstrings_and_imports() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again by `python -m tests.docs.extend`"
