"""The steps that a run has still to do, as the block around a loop.

Entering the block restores the newest checkpoint. Leaving it waits until the last one is on disk. Leaving it because
the run was stopped (Ctrl-C, SIGTERM and SIGHUP cancel the loop's task), or because a process failed, saves the last
finished step if the trainers still have it.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from controller.processes.errors import MeshError
from controller.runs.checkpoints import Checkpoints
from rl.startup import without_walking_what_exists


class Steps:
    """Iterates over the numbers of the remaining steps. Made by `Run.steps`."""

    def __init__(self, checkpoints: Checkpoints, num_steps: int) -> None:
        """`num_steps` is the last step of the run."""
        self._checkpoints = checkpoints
        self._num_steps = num_steps
        self._exempted = contextlib.ExitStack()
        self.remaining = range(1, num_steps + 1)
        """The steps to do, if the run does not end early; known once the block is entered."""

    async def __aenter__(self) -> Self:
        first = await self._checkpoints.resume()
        self.remaining = range(first, first if self._checkpoints.solved else self._num_steps + 1)
        self._exempted.enter_context(without_walking_what_exists())  # by now all processes have started
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exempted.close()
        if isinstance(error, asyncio.CancelledError):
            await self._checkpoints.save_last_step()
        elif isinstance(error, MeshError):
            await self._checkpoints.save_after_failure()
        elif error is None:
            await self._checkpoints.finish()

    def __iter__(self) -> Iterator[int]:
        """Ends after the last step, and earlier once the run is solved."""
        for step in self.remaining:
            if self._checkpoints.solved:
                return
            yield step
