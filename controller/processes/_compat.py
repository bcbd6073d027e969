"""A patch of Monarch 0.7, with its reason and the condition for its removal."""

from typing import Any

import monarch._src.actor.proc_mesh as proc_mesh
from monarch._src.actor.logging import LoggingManager


class _NoForwarding(LoggingManager):
    """Starts no actors that forward output, and has nothing to flush."""

    async def init(self, proc_mesh: Any, stream_to_client: bool) -> None:
        """Starts nothing. The output of a process goes to its log, which it opens itself."""

    async def flush_async(self) -> None:
        """Does nothing. Monarch calls this before it stops processes."""


def forward_no_output() -> None:
    """Keeps Monarch from starting actors that forward the output of processes. Calling it again does nothing.

    It starts them although forwarding is off, asks each of them again and again whether it lives, and never frees what
    it makes for the question: with three meshes 1 MB a minute if it asks every second. Remove when Monarch starts none,
    or keeps nothing; `tests/e2e/test_mesh.py` measures what an idle mesh keeps.
    """
    proc_mesh.LoggingManager = _NoForwarding
