"""docs/script_api.md has a line for every public name of the modules that scripts import from."""

import ast
import importlib
import inspect
import re

import pytest

from tests.docs.pages import INSTALLED, PAGES, ROOT, blocks_of

PAGE = (ROOT / "docs" / "script_api.md").read_text(encoding="utf-8")
SECTIONS = {section.split("\n", 1)[0].strip("`"): section for section in PAGE.split("\n## ")[1:]}


def _public(module: str) -> set[str]:
    """`__all__`, or else the classes and functions that a module defines."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return set(loaded.__all__)
    own = {
        name
        for name, value in vars(loaded).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module
    }
    return {name for name in own if not name.startswith("_")}


@pytest.mark.stranger("F7")
@pytest.mark.parametrize("module", sorted(SECTIONS))
def test_every_public_name_has_a_line(module: str) -> None:
    lines = re.findall(r"^\| `(\w+)` \| .+ \|$", SECTIONS[module], re.MULTILINE)
    assert sorted(lines) == sorted(_public(module))


def test_a_name_comes_from_one_module_on_every_page() -> None:
    sources = [block.text for page in PAGES for block in blocks_of(page) if block.language == "python"]
    sources += [
        path.read_text(encoding="utf-8")
        for folder in (ROOT, *INSTALLED)
        for pattern in ("examples/*.py", "configs/*.py", "controller/loops/*.py")
        for path in folder.glob(pattern)
    ]
    modules = dict[str, set[str]]()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    modules.setdefault(alias.name, set()).add(node.module)
    assert "controller.runs" in modules["resolve_model"]
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
