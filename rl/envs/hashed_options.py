"""Options of another package's environments, as users write them."""

from typing import Any


class Options(dict[str, Any]):
    """Options by name, which can be the key of a cache although their values may be lists. Not to be changed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # a dict says it has none
        """Equal options have the same: it follows from their names alone."""
        return hash(frozenset(self))
