"""Which boxes this host has, for the tests."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from ownloop_sandbox import Sandbox, find_way
from ownloop_sandbox.sandboxes import Box, BoxConfig, SandboxName, check_sandbox, make_sandbox

REAL: tuple[Sandbox, ...] = ("bubblewrap", "namespaces")
BOXES: tuple[SandboxName, ...] = ("bubblewrap", "namespaces")
T = TypeVar("T")


def need(sandbox: Sandbox) -> None:
    """Skips the test, with the reason, if this host has no such sandbox."""
    try:
        find_way(sandbox)
    except ValueError as error:
        pytest.skip(str(error).partition(". Install")[0])


def need_box(name: SandboxName) -> None:
    """Skips the test, with the reason, if this host has no such box for programs."""
    try:
        check_sandbox(name)
    except ValueError as error:
        pytest.skip(str(error).partition(". Allow")[0])


async def in_a_box(name: SandboxName, place: BoxConfig, use: Callable[[Box], Awaitable[T]]) -> T:
    """Uses a new box, which is then destroyed."""
    box = make_sandbox(name, place)
    try:
        await box.create()
        return await use(box)
    finally:
        await box.destroy()
