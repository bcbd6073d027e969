"""Findings about an environment, and the check of its prompts and observations."""

from collections.abc import Sequence
from typing import Any

from rl.data.rows import prompt_fault

ROLES = ("system", "user", "assistant", "tool")


class Findings:
    """A list of sentences for the environment's author: the first finding of each kind."""

    def __init__(self) -> None:
        """There are none yet."""
        self._by_kind: dict[str, str] = {}

    @property
    def sentences(self) -> list[str]:
        """All findings, in the order in which they were added."""
        return list(self._by_kind.values())

    def add(self, finding: str, kind: str | None = None) -> None:
        """Adds a finding unless there is one of this kind. Without `kind`, only an equal finding is left out."""
        self._by_kind.setdefault(kind or finding, finding)


def message_fault(prompt: Any) -> str:
    """What is wrong with a prompt or an observation; "" if nothing is. Stricter than `prompt_fault`: it knows roles."""
    fault = prompt_fault(prompt)
    if fault or isinstance(prompt, str):
        return fault
    messages: Sequence[Any] = prompt
    unknown = [message["role"] for message in messages if message["role"] not in ROLES]
    return f"has a message of role {unknown[0]!r}; roles are {', '.join(ROLES)}" if unknown else ""
