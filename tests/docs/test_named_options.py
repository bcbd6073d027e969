"""Options that a page names between its code blocks are options of a command, or of a recipe."""

import importlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from controller.commands.command_line import COMMANDS, CommandEndedError, parse_command
from controller.commands.recipes import all_options, configuration, recipe_files
from rl.system.plugins import named_by
from tests.docs.commands import needs_more
from tests.docs.pages import PAGES, ROOT

_OTHERS = {"--no-deps", "--network", "--version"}
"""Options of pip, of docker, and of `ownloop` without a command."""
_OPTION = re.compile(r"--[a-z][\w.-]*\w")


@cache
def options() -> frozenset[str]:
    """Every option that the help of a command shows, and every field of a recipe."""
    parts = named_by("commands")
    texts = [_help(parse_command, [name, "--help"]) for name in (*COMMANDS, *parts) if name != "serve"]
    texts += [" ".join(all_options(configuration(recipe, (), "run"))) for recipe in recipe_files()]
    if "serve" in parts:
        served: Any = importlib.import_module(type(parse_command(["serve"])).__module__)
        texts.append(_help(served.configuration, ["--help"]))
    return frozenset(_OPTION.findall(" ".join(texts)))


def _help(show: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(CommandEndedError) as ended:
        show(*arguments)
    return str(ended.value)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_options_that_a_page_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    if page.name.startswith("from_"):  # the first cell of its tables has another library's names
        text = re.sub(r"^\|.*?[^\\]\|", "|", text, flags=re.MULTILINE)
    spans = re.findall(r"`((?:--|ownloop )[^`]+)`", text)
    named = {option for span in spans if not _of_others(span) for option in _OPTION.findall(span)} - _OTHERS
    groups = {".".join(option.split(".")[:count]) for option in options() for count in (1, 2)}  # --lora of --lora.rank
    assert named - options() - groups == set()


def _of_others(span: str) -> bool:
    """Whether it is a command of a plug-in that is not installed here."""
    words = span.removeprefix("ownloop ").split()
    return span.startswith("ownloop ") and needs_more(words)
