"""What tests of environments with wrong fields have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import pytest

OTHER_VALUES = (object(), b"x", 2.5j)
"""Values that no field may have."""
FAILING_MODULES = (
    ("mine_cut", "def f(:\n", r"mine_cut.py, line 1: invalid syntax"),
    ("mine_over", "\nraise SystemExit(0)", r"SystemExit: 0 \(.*mine_over.py, line 2\)"),
    ("mine_wrong", "f = undefined", r"NameError: name 'undefined' is not defined \(.*mine_wrong.py, line 1\)"),
    ("mine_apart", "import no_such_module", r"No module named 'no_such_module'"),
    ("mine_strict", "raise ValueError('of mine')", "of mine"),
    ("mine_five", "f = 5", r"a int; it must be a function"),
    ("mine_other", "g = print", r"has no attribute 'f'"),
)
"""Name and content of a module whose function `f` cannot be had, and what is said of it."""


def fields_of(kinds: Iterable[Any]) -> list[tuple[Any, str]]:
    """Each class with each of its fields."""
    return [(kind, each.name) for kind in kinds for each in fields(kind)]


def assert_field_is_named(kind: Any, required: Mapping[str, Any], field: str, value: object) -> None:
    """A field of another type is refused by its name; `required` are fields that `kind` cannot be made without."""
    message = rf"{kind.__name__}\.{field} is |env is a {type(value).__name__}, and its name"
    with pytest.raises(ValueError, match=message):
        kind(**{**required, field: value})
