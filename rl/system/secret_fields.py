"""Keeps secrets out of the files, pages and help texts of a run: an environment may need the key of a service.

A field is secret if its type says so: `api_key: Secret = ""`. No other value is looked at.
"""

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, cast, get_args, get_type_hints

HIDDEN = "***"
"""Stands for the value of a secret."""


class _Declared:
    """Marks the type of a secret field."""


Secret = Annotated[str, _Declared()]
"""The type of a dataclass's field that holds a secret: `api_key: Secret = ""`. The value is a plain `str`."""


@functools.cache
def is_declared(owner: type, field: str) -> bool:
    """Whether a dataclass declares this field as `Secret`, or as an optional one."""
    try:
        hint = get_type_hints(owner, include_extras=True).get(field)
    except (NameError, AttributeError, TypeError):  # a name that only type checkers import
        hint = owner.__annotations__.get(field)
    return bool(re.search(r"\bSecret\b", hint)) if isinstance(hint, str) else _mentions(hint)


def hide_all(value: object) -> object:
    """The value of a secret field with all its texts hidden."""
    if isinstance(value, Mapping):
        return {key: hide_all(item) for key, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [hide_all(item) for item in cast("Sequence[object]", value)]
    return HIDDEN if isinstance(value, str | bytes) and value else value


def with_hidden_secrets(config: Any) -> Any:
    """A dataclass to show to a user, with the secrets of its fields hidden."""
    shown = dict[str, object]()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            shown[field.name] = with_hidden_secrets(value)
        elif is_declared(type(config), field.name):
            shown[field.name] = hide_all(value)
    changed = {name: value for name, value in shown.items() if value is not getattr(config, name)}
    return dataclasses.replace(config, **changed) if changed else config


def hide_in_options(options: Sequence[str], hidden: Collection[str]) -> list[str]:
    """Command-line options with the values of the fields `hidden` replaced: "env.api_key" for `--env.api-key=...`."""
    shown: list[str] = []
    owner = ""
    for option in options:
        if option.startswith("--"):
            owner, equals, _ = option.partition("=")
            secret = owner.removeprefix("--").replace("-", "_") in hidden
            shown.append(f"{owner}={HIDDEN}" if equals and secret else option)
        else:
            shown.append(HIDDEN if owner.removeprefix("--").replace("-", "_") in hidden else option)
    return shown


def hidden_fields(config: object, prefix: str = "") -> list[str]:
    """The fields of a recorded configuration that are hidden: `env.api_key`."""
    if isinstance(config, Mapping):
        fields = cast("Mapping[str, object]", config).items()
        return [name for key, item in fields for name in hidden_fields(item, f"{prefix}.{key}" if prefix else key)]
    return [prefix] if config == HIDDEN else []


def _mentions(hint: object) -> bool:
    """Whether a type is `Secret`, or has it among its arguments."""
    return isinstance(hint, _Declared) or any(_mentions(argument) for argument in get_args(hint))
