"""Keeps secrets out of the files of a run: an environment may be given the key of a service, for example.

A field is taken for a secret by its name, so an environment that calls its key `option7` is not helped.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any, cast

HIDDEN = "***"
"""Stands for the value of a secret."""
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_SECRET_WORDS = frozenset(
    {"secret", "password", "passwd", "passphrase", "token", "credential", "credentials", "apikey"}
)
_KEY_OF = frozenset({"api", "access", "auth", "private", "secret", "service"})


def hide_secrets(value: Any) -> Any:
    """A value in JSON types, with every text below a secret field replaced by `HIDDEN`. Numbers are no secrets."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return {name: _hidden(item) if is_secret(name) else hide_secrets(item) for name, item in fields.items()}
    if isinstance(value, list):
        return [hide_secrets(item) for item in cast("list[Any]", value)]
    return value


def is_secret(field: str) -> bool:
    """Whether a field's name says that it holds a secret: `api_key`, `HF_TOKEN` and `dbPassword`, not `max_tokens`."""
    words = [word.lower() for word in _WORDS.findall(field)]
    keys = any(first in _KEY_OF and second in ("key", "keys") for first, second in itertools.pairwise(words))
    return keys or not _SECRET_WORDS.isdisjoint(words)


def _hidden(value: Any) -> Any:
    """Everything below a secret field, with its texts hidden."""
    if isinstance(value, Mapping):
        return {name: _hidden(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_hidden(item) for item in cast("list[Any]", value)]
    return HIDDEN if isinstance(value, str) and value else value
